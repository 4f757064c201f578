// SPDX-License-Identifier: Apache-2.0
// Judging by another program: requests go to child processes (worker.h). One that is late, dies, or prints what is no
// answer is ended and replaced; its request is tried again.
//
// An answer has "reward": a finite number.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "sluice/rl/worker.h"

namespace sluice {

struct JudgeLimits {
  std::int64_t workers = 1;  // processes at once
  WorkerLimits worker = {};
  std::int64_t retries = 2;  // after a first failure
};

class Judge {
 public:
  // Starts the processes and waits until they are ready. Usage error if one cannot be.
  Judge(std::vector<std::string> command, const JudgeLimits& limits);

  // The reward of each request, in their order; none where every try failed. Each failure is logged.
  std::vector<std::optional<double>> judge(const std::vector<nlohmann::ordered_json>& requests);

  std::int64_t failures() const { return failures_; }  // of all tries so far
  const std::string& last_failure() const { return last_failure_; }

 private:
  void fail_try(std::size_t request, const std::string& why);

  std::vector<std::string> command_;
  JudgeLimits limits_;
  std::vector<std::unique_ptr<Worker>> workers_;  // null: ended
  std::int64_t failures_ = 0;
  std::string last_failure_;
};

// The command that judges by a Python function, "file.py:function", called with the keywords prompt, completion, answer
// and record for each request; it returns a number. Usage error if the place is not of that form or the file is not
// there.
std::vector<std::string> python_judge(const std::string& place);

// The command that judges by the scorer of a generator of reasoning-gym: requests whose record is one that
// python -m sluice.reasoning_gym wrote. What it judges is the text in the last pair of <answer> tags, or all of the
// completion without such a pair.
std::vector<std::string> reasoning_gym_judge();

}  // namespace sluice
