// SPDX-License-Identifier: Apache-2.0
// A child process that answers requests, one at a time. Both are lines of JSON on its standard input and output.
//
// Once it has loaded it writes {"ready": true}, or {"error": text} where it cannot. Then it is sent objects with "id",
// and answers each with an object of the same "id": what was asked for, or "error": text.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

struct WorkerLimits {
  double load_timeout_s = 60;  // from the start until it is ready
  double timeout_s = 10;       // of one answer
  double memory_gib = 4;       // address space
};

class Worker {
 public:
  // Starts `command`, program and arguments; the program is looked for in PATH. Usage error if it cannot be started.
  Worker(const std::vector<std::string>& command, const WorkerLimits& limits);
  ~Worker();  // ends it and what it has started
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Waits until it is ready. Empty, or why it never will be.
  std::string wait_until_ready();

  // An object without "id". It is sent when the process is ready; the time for an answer begins then.
  void send(nlohmann::ordered_json request);
  bool busy() const { return busy_; }  // with a request

  // What poll() is to wait for, and for how long at most.
  pollfd reading() const { return {.fd = from_.read, .events = POLLIN, .revents = 0}; }
  pollfd writing() const { return {.fd = out_.empty() ? -1 : to_.write, .events = POLLOUT, .revents = 0}; }
  double seconds_left() const;

  // How the request ended: with an answer, or an error, which says what the process did.
  struct Reply {
    nlohmann::ordered_json answer = {};
    std::string error = {};
    bool usable = true;  // the process can be sent further requests
  };
  // Goes on with what poll() found ready. None: the request is still under way.
  std::optional<Reply> advance(bool readable, bool writable);

 private:
  struct Pipe {
    int read = -1, write = -1;
    Pipe();
    void close();
  };

  bool write_some();
  bool read_some();
  std::optional<Reply> read_line();
  std::string greet(const std::string& line, const nlohmann::ordered_json& json);
  void begin(double seconds);

  WorkerLimits limits_;
  Pipe to_, from_;
  pid_t pid_ = -1;
  bool ready_ = false, busy_ = false;
  std::int64_t id_ = -1;  // of the newest request
  std::string held_;      // a request that waits until the process is ready
  std::string out_, in_;  // to be written; read so far
  std::chrono::steady_clock::time_point deadline_;
};

// Waits until something happens to the workers that are busy, or the time of one is up, and tells how requests ended. A
// worker that cannot be used any more is ended: null.
void wait_for_replies(std::vector<std::unique_ptr<Worker>>& workers,
                      const std::function<void(std::size_t worker, const Worker::Reply&)>& ended);

// Starts `count` of them and waits until all are ready. Usage error if one never will be.
std::vector<std::unique_ptr<Worker>> start_workers(const std::vector<std::string>& command, std::int64_t count,
                                                   const WorkerLimits& limits);

// The command that runs Python code which defines load(*arguments): it returns a function from a request, without its
// id, to a dict, the answer. The code may use find(file, name), which imports, and finite(value), a float or an error.
// What it prints goes to standard error.
std::vector<std::string> python_worker(const std::string& code, const std::vector<std::string>& arguments);

// "FILE.py:NAME" as {file, name}. Usage error that names `option` if the place is not of that form or the file is not
// there.
std::vector<std::string> python_place(std::string_view option, const std::string& place);

}  // namespace sluice
