// SPDX-License-Identifier: Apache-2.0
// For tests: several ranks of a world as threads of one process.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "sluice/core/error.h"
#include "sluice/parallel/world.h"

namespace sluice {

// A port that nobody listens at.
inline std::uint16_t free_port() {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  const bool done = ::bind(listener, any, length) == 0 && ::getsockname(listener, any, &length) == 0;
  ::close(listener);
  SLUICE_CHECK(done, "test: no free port");
  return ntohs(address.sin_port);
}

// Runs `rank_main` on `size` threads, each with its World. Throws what the lowest rank threw, after all have ended.
inline void run_ranks(std::int64_t size, const std::function<void(const World&)>& rank_main,
                      std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  ::setenv("TORCH_FR_BUFFER_SIZE", "0", 1);  // c10d's recorder of exchanges is one for all threads, without a lock
  const auto port = free_port();
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (std::int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const World world({.rank = rank, .size = size, .local_rank = rank, .address = "127.0.0.1", .port = port},
                          timeout);
        rank_main(world);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace sluice
