// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/judge.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <deque>
#include <filesystem>
#include <utility>

#include "sluice/core/error.h"
#include "sluice/core/log.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kFinite = R"py(
import math
def finite(value):
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    return {"reward": reward}
)py";

constexpr std::string_view kPythonFunction = R"py(
import importlib.util, os, sys
def load(path, name):
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("sluice_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
    return lambda request: finite(function(**request))
)py";

constexpr std::string_view kReasoningGym = R"py(
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
        return finite(scorer(entry["metadata"]["source_dataset"])(answer=answer, entry=entry))
    return respond
)py";

std::vector<std::string> finite_python(std::string_view code, const std::vector<std::string>& arguments) {
  return python_worker(std::string(kFinite) + std::string(code), arguments);
}

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
    : command_(std::move(command)), limits_(limits), workers_(static_cast<std::size_t>(limits.workers)) {
  std::signal(SIGPIPE, SIG_IGN);  // a process that died is an error of write(), not our end
  for (auto& worker : workers_) worker = std::make_unique<Worker>(command_, limits_.worker);
  for (auto& worker : workers_) {
    if (const auto why = worker->wait_until_ready(); !why.empty()) fail_usage("reward: {} {}", command_[0], why);
  }
}

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
    double soonest = 1;
    std::vector<pollfd> polled;
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      auto& worker = workers_[i];
      if (!waiting.empty() && (!worker || !worker->busy())) {
        if (!worker) worker = std::make_unique<Worker>(command_, limits_.worker);
        held[i] = waiting.front();
        worker->send(requests[held[i]]);
        waiting.pop_front();
      }
      const bool busy = worker && worker->busy();
      polled.push_back(busy ? worker->reading() : pollfd{.fd = -1, .events = 0, .revents = 0});
      polled.push_back(busy ? worker->writing() : pollfd{.fd = -1, .events = 0, .revents = 0});
      if (busy) soonest = std::min(soonest, worker->seconds_left());
    }
    ::poll(polled.data(), polled.size(), static_cast<int>(std::ceil(1000 * std::max(soonest, 0.0))));
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      auto& worker = workers_[i];
      if (!worker || !worker->busy()) continue;
      const auto reply = worker->advance(polled[2 * i].revents != 0, polled[2 * i + 1].revents != 0);
      if (!reply) continue;
      if (!reply->usable) worker.reset();
      const auto request = held[i];
      const auto why = reply->error.empty() ? take_reward(reply->answer, rewards[request]) : reply->error;
      if (!why.empty()) fail_try(request, why);
      if (!why.empty() && ++tries[request] <= limits_.retries) waiting.push_back(request);
      else --open;
    }
  }
  return rewards;
}

std::vector<std::string> python_judge(const std::string& place) {
  const auto colon = place.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == place.size()) {
    fail_usage("reward.python: expected FILE.py:FUNCTION, got {}", place);
  }
  const auto file = place.substr(0, colon);
  if (!std::filesystem::exists(file)) fail_usage("reward.python: there is no {}", file);
  return finite_python(kPythonFunction, {file, place.substr(colon + 1)});
}

std::vector<std::string> reasoning_gym_judge() { return finite_python(kReasoningGym, {}); }

}  // namespace sluice
