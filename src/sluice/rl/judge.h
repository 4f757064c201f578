// SPDX-License-Identifier: Apache-2.0
// Judging by another program: requests go to child processes as lines of JSON and their answers come back so. A child
// that is late, dies, or prints anything else is ended and replaced; its request is tried again.
//
// A request is an object with "id"; the answer {"id": the same, "reward": a finite number} or {"id", "error": text}.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace sluice {

struct JudgeLimits {
  std::int64_t workers = 1;  // processes at once
  double timeout_s = 10;     // of one request by the clock; the first of a process has a minute more, to load
  double memory_gib = 4;     // address space of a process
  std::int64_t retries = 2;  // after a first failure
};

class Judge {
 public:
  // `command`: program and arguments; the program is looked for in PATH. Nothing is started yet.
  Judge(std::vector<std::string> command, const JudgeLimits& limits);
  ~Judge();  // ends the processes
  Judge(const Judge&) = delete;
  Judge& operator=(const Judge&) = delete;

  // The reward of each request, in their order; none where every try failed. Each failure is logged. Usage error if the
  // program cannot be started.
  std::vector<std::optional<double>> judge(const std::vector<nlohmann::ordered_json>& requests);

  std::int64_t failures() const { return failures_; }  // of all tries so far
  const std::string& last_failure() const { return last_failure_; }

 private:
  class Process;
  void fail_try(std::size_t request, const std::string& why);

  std::vector<std::string> command_;
  JudgeLimits limits_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::int64_t next_id_ = 0;
  std::int64_t failures_ = 0;
  std::string last_failure_;
};

// The command that judges by a Python function, "file.py:function", called with the keywords prompt, completion, answer
// and record for each request; it returns a number. What it prints goes to standard error. Usage error if the place is
// not of that form or the file is not there.
std::vector<std::string> python_judge(const std::string& place);

}  // namespace sluice
