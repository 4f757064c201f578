// SPDX-License-Identifier: Apache-2.0
// Help for tests: a folder of their own, a process of their own, and the words of an error.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <filesystem>
#include <string>
#include <string_view>

#include "sluice/core/error.h"

namespace sluice {

// An empty folder that goes away with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> count{0};
    path_ = std::filesystem::temp_directory_path() / fmt::format("sluice-test-{}-{}", ::getpid(), count++);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

// Runs `action` in a child process and returns how it ended, as wait() tells. The child exits with what action returns,
// or with the code of the Error that it throws, or with 99.
template <typename Action>
int run_in_child(Action action) {
  const auto child = ::fork();
  if (child == 0) {
    int status = 99;
    try {
      status = action();
    } catch (const Error& error) {
      status = static_cast<int>(error.code());
    } catch (const std::exception&) {
    }
    ::_exit(status);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

// The message of the Error that `action` must end in, with exit code `code`; "no error" if there is none.
template <typename Action>
std::string error_of(Action&& action, ExitCode code) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

template <typename Action>
std::string data_error(Action&& action) {
  return error_of(action, ExitCode::kData);
}

}  // namespace sluice
