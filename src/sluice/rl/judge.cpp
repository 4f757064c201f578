// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/judge.h"

#include <cmath>
#include <deque>
#include <utility>

#include "sluice/core/error.h"
#include "sluice/core/log.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

constexpr auto kPythonFunction = R"py(
def load(path, name):
    function = find(path, name)
    return lambda request: {"reward": finite(function(**request))}
)py";

constexpr auto kReasoningGym = R"py(
import functools, re, sys
def load():
    try:
        import reasoning_gym
    except ImportError as error:
        raise RuntimeError(f"{error}; {sys.executable} -m pip install reasoning-gym, or let PATH begin with the "
                           "folder of a python3 that has it") from error
    scorer = functools.cache(reasoning_gym.get_score_answer_fn)
    def respond(request):
        tagged = re.findall("<answer>(.*?)</answer>", request["completion"], re.DOTALL)
        answer = (tagged or [request["completion"]])[-1].strip()
        entry = request["record"]["reasoning_gym"]
        return {"reward": finite(scorer(entry["metadata"]["source_dataset"])(answer=answer, entry=entry))}
    return respond
)py";

// The finite reward of an answer, or what is wrong with it.
std::string take_reward(const Json& answer, std::optional<double>& reward) {
  const auto found = answer.find("reward");
  if (found == answer.end() || !found->is_number() || !std::isfinite(found->get<double>())) {
    return fmt::format("gave no finite reward: {}", answer.dump());
  }
  reward = found->get<double>();
  return "";
}

}  // namespace

Judge::Judge(std::vector<std::string> command, const JudgeLimits& limits)
    : command_(std::move(command)), limits_(limits), workers_(start_workers(command_, limits.workers, limits.worker)) {}

void Judge::fail_try(std::size_t request, const std::string& why) {
  ++failures_;
  last_failure_ = why;
  log_warning("reward: request {} of this step: {} {}", request + 1, command_[0], why);
}

std::vector<std::optional<double>> Judge::judge(const std::vector<Json>& requests) {
  std::vector<std::optional<double>> rewards(requests.size());
  std::vector<std::int64_t> tries(requests.size(), 0);
  std::deque<std::size_t> waiting;
  for (std::size_t i = 0; i < requests.size(); ++i) waiting.push_back(i);
  std::vector<std::size_t> held(workers_.size());  // the request that each worker is busy with
  std::size_t open = requests.size();              // without a reward and with tries left

  while (open > 0) {
    for (std::size_t i = 0; i < workers_.size() && !waiting.empty(); ++i) {
      auto& worker = workers_[i];
      if (worker && worker->busy()) continue;
      if (!worker) worker = std::make_unique<Worker>(command_, limits_.worker);
      held[i] = waiting.front();
      worker->send(requests[held[i]]);
      waiting.pop_front();
    }
    wait_for_replies(workers_, [&](std::size_t i, const Worker::Reply& reply) {
      const auto request = held[i];
      const auto why = reply.error.empty() ? take_reward(reply.answer, rewards[request]) : reply.error;
      if (!why.empty()) fail_try(request, why);
      if (!why.empty() && ++tries[request] <= limits_.retries) waiting.push_back(request);
      else --open;
    });
  }
  return rewards;
}

std::vector<std::string> python_judge(const std::string& place) {
  return python_worker(kPythonFunction, python_place("reward.python", place));
}

std::vector<std::string> reasoning_gym_judge() { return python_worker(kReasoningGym, {}); }

}  // namespace sluice
