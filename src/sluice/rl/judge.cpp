// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/judge.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <deque>
#include <filesystem>
#include <utility>

#include "sluice/core/error.h"
#include "sluice/core/log.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr double kLoading_s = 60;                             // more time for the first request of a process
constexpr std::size_t kLongestAnswer = std::size_t{1} << 20;  // bytes of a line

// Runs in the child. The protocol keeps the old standard output to itself, so that a function may print.
constexpr auto kPythonHost = R"py(
import importlib.util, json, math, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
path, name = sys.argv[1:]
function, problem = None, None
try:
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("sluice_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
except Exception as error:
    problem = f"{path}: {type(error).__name__}: {error}"
for line in sys.stdin:
    request = json.loads(line)
    answer = {"id": request.pop("id")}
    try:
        if problem:
            raise RuntimeError(problem)
        reward = float(function(**request))
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}")
        answer["reward"] = reward
    except Exception as error:
        answer["error"] = problem or f"{type(error).__name__}: {error}"
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
)py";

double seconds_until(Clock::time_point end) { return std::chrono::duration<double>(end - Clock::now()).count(); }

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail(ExitCode::kRuntime, "judge: no pipe: {}", std::strerror(errno));
    read = ends[0];
    write = ends[1];
  }
  void close() {
    if (read >= 0) ::close(read);
    if (write >= 0) ::close(write);
    read = write = -1;
  }
};

}  // namespace

// One child and what is under way with it.
class Judge::Process {
 public:
  Process(const std::vector<std::string>& command, const JudgeLimits& limits) {
    std::vector<char*> arguments;
    for (const auto& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to_.read, 0);
    posix_spawn_file_actions_adddup2(&actions, from_.write, 1);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t handled;  // as the shell would start it, whatever we catch or ignore
    sigemptyset(&handled);
    for (const int signal : {SIGPIPE, SIGINT, SIGTERM, SIGUSR1}) sigaddset(&handled, signal);
    posix_spawnattr_setsigdefault(&attributes, &handled);
    posix_spawnattr_setpgroup(&attributes, 0);  // its own: a terminal's Ctrl-C is ours, and its children end with it
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
    const int failed = ::posix_spawnp(&pid_, arguments[0], &actions, &attributes, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    ::close(std::exchange(to_.read, -1));
    ::close(std::exchange(from_.write, -1));
    if (failed != 0) {
      pid_ = -1;
      fail_usage("reward: cannot start {}: {}", command[0], std::strerror(failed));
    }
    const auto bytes = static_cast<rlim_t>(limits.memory_gib * (1 << 30));
    const rlimit memory{bytes, bytes};
    ::prlimit(pid_, RLIMIT_AS, &memory, nullptr);
    for (const int end : {to_.write, from_.read}) ::fcntl(end, F_SETFL, O_NONBLOCK);
  }

  ~Process() {
    to_.close();
    from_.close();
    if (pid_ <= 0) return;
    ::kill(-pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void send(std::size_t request, std::int64_t id, Json json, double timeout_s) {
    json["id"] = id;
    request_ = request;
    id_ = id;
    out_ = json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    in_.clear();
    const auto allowed = timeout_s + (used_ ? 0 : kLoading_s);
    deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(allowed));
    used_ = true;
  }

  bool busy() const { return request_.has_value(); }
  std::size_t request() const { return *request_; }
  double seconds_left() const { return seconds_until(deadline_); }
  pollfd reading() const { return {.fd = from_.read, .events = POLLIN, .revents = 0}; }
  pollfd writing() const { return {.fd = out_.empty() ? -1 : to_.write, .events = POLLOUT, .revents = 0}; }

  // Writes what the pipe takes. False: the child does not read any more.
  bool write_some() {
    const auto count = ::write(to_.write, out_.data(), out_.size());
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    out_.erase(0, static_cast<std::size_t>(count));
    return true;
  }

  // Reads what is there. False: the child has ended or sends too much.
  bool read_some() {
    char buffer[4096];
    const auto count = ::read(from_.read, buffer, sizeof buffer);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    in_.append(buffer, static_cast<std::size_t>(count));
    return count > 0 && in_.size() <= kLongestAnswer;
  }

  // The whole answer, if it is there. `error` says what is wrong with it.
  struct Answer {
    double reward = 0;
    std::string error = {};
    bool broken = false;  // the child does not keep to the protocol
  };
  std::optional<Answer> answer() {
    const auto end = in_.find('\n');
    if (end == std::string::npos) return std::nullopt;
    const auto line = in_.substr(0, end);
    const bool more = end + 1 < in_.size();
    in_.clear();
    request_.reset();
    const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto shown = line.size() > 80 ? line.substr(0, 80) + "..." : line;
    if (more || !out_.empty() || !json.is_object() || !json.contains("id") || json["id"] != id_) {
      return Answer{.error = fmt::format("printed what is no answer: {}", shown), .broken = true};
    }
    if (json.contains("error")) return Answer{.error = json["error"].dump()};
    const auto reward = json.find("reward");
    if (reward == json.end() || !reward->is_number() || !std::isfinite(reward->get<double>())) {
      return Answer{.error = fmt::format("gave no finite reward: {}", shown)};
    }
    return Answer{.reward = reward->get<double>()};
  }

 private:
  Pipe to_, from_;
  pid_t pid_ = -1;
  bool used_ = false;
  std::optional<std::size_t> request_;
  std::int64_t id_ = 0;
  std::string out_, in_;
  Clock::time_point deadline_;
};

Judge::Judge(std::vector<std::string> command, const JudgeLimits& limits)
    : command_(std::move(command)), limits_(limits), processes_(static_cast<std::size_t>(limits.workers)) {
  std::signal(SIGPIPE, SIG_IGN);  // a child that died is an error of write(), not our end
}

Judge::~Judge() = default;

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
  std::size_t open = requests.size();  // without a reward and with tries left

  const auto failed = [&](std::size_t request, const std::string& why) {
    fail_try(request, why);
    if (++tries[request] <= limits_.retries) waiting.push_back(request);
    else --open;
  };
  while (open > 0) {
    double soonest = 1;
    std::vector<pollfd> polled;
    for (auto& process : processes_) {
      if (!waiting.empty() && (!process || !process->busy())) {
        if (!process) process = std::make_unique<Process>(command_, limits_);
        process->send(waiting.front(), next_id_++, requests[waiting.front()], limits_.timeout_s);
        waiting.pop_front();
      }
      const bool busy = process && process->busy();
      polled.push_back(busy ? process->reading() : pollfd{.fd = -1, .events = 0, .revents = 0});
      polled.push_back(busy ? process->writing() : pollfd{.fd = -1, .events = 0, .revents = 0});
      if (busy) soonest = std::min(soonest, process->seconds_left());
    }
    ::poll(polled.data(), polled.size(), static_cast<int>(std::ceil(1000 * std::max(soonest, 0.0))));
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      auto& process = processes_[i];
      if (!process || !process->busy()) continue;
      const auto request = process->request();
      bool alive = true;
      if (polled[2 * i + 1].revents != 0) alive = process->write_some();
      if (polled[2 * i].revents != 0) alive = process->read_some() && alive;
      if (const auto answer = process->answer()) {
        if (answer->error.empty()) {
          rewards[request] = answer->reward;
          --open;
        } else {
          failed(request, answer->error);
        }
        if (answer->broken) process.reset();
      } else if (!alive) {
        process.reset();
        failed(request, "ended without an answer");
      } else if (process->seconds_left() <= 0) {
        process.reset();
        failed(request, fmt::format("gave no answer within {} s and was ended", limits_.timeout_s));
      }
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
  return {"python3", "-c", kPythonHost, file, place.substr(colon + 1)};
}

}  // namespace sluice
