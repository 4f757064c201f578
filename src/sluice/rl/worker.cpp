// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/worker.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <utility>

#include "sluice/core/error.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr std::size_t kLongestAnswer = std::size_t{1} << 20;  // bytes of a line

// In front of code that defines load().
constexpr auto kPythonTools = R"py(
import importlib.util, math, os, sys
def find(path, name):
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("sluice_" + name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
def finite(value):
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    return reward
)py";

// Behind it. The protocol keeps the old standard output to itself, so that the
// code may print.
constexpr auto kPythonLoop = R"py(
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
def say(answer):
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
def told(error):
    return {"error": f"{type(error).__name__}: {error}"}
try:
    respond = load(*sys.argv[1:])
except Exception as error:
    say(told(error))
    sys.exit(1)
say({"ready": True})
for line in sys.stdin:
    request = json.loads(line)
    answer = {"id": request.pop("id")}
    try:
        answer |= respond(request)
    except Exception as error:
        answer |= told(error)
    say(answer)
)py";

std::string shown(const std::string& line) { return line.size() > 80 ? line.substr(0, 80) + "..." : line; }

}  // namespace

Worker::Pipe::Pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail(ExitCode::kRuntime, "reward: no pipe: {}", std::strerror(errno));
  read = ends[0];
  write = ends[1];
}

void Worker::Pipe::close() {
  if (read >= 0) ::close(read);
  if (write >= 0) ::close(write);
  read = write = -1;
}

Worker::Worker(const std::vector<std::string>& command, const WorkerLimits& limits) : limits_(limits) {
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
    to_.close();
    from_.close();
    fail_usage("reward: cannot start {}: {}", command[0], std::strerror(failed));
  }
  const auto bytes = static_cast<rlim_t>(limits.memory_gib * (1 << 30));
  const rlimit memory{bytes, bytes};
  ::prlimit(pid_, RLIMIT_AS, &memory, nullptr);
  for (const int end : {to_.write, from_.read}) ::fcntl(end, F_SETFL, O_NONBLOCK);
  begin(limits.load_timeout_s);
}

Worker::~Worker() {
  to_.close();
  from_.close();
  ::kill(-pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Worker::begin(double seconds) {
  deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

double Worker::seconds_left() const { return std::chrono::duration<double>(deadline_ - Clock::now()).count(); }

std::string Worker::wait_until_ready() {
  while (!ready_) {
    auto polled = reading();
    ::poll(&polled, 1, static_cast<int>(std::ceil(1000 * std::max(seconds_left(), 0.0))));
    if (const auto reply = advance(polled.revents != 0, false)) return reply->error;
  }
  return "";
}

void Worker::send(Json request) {
  request["id"] = ++id_;
  busy_ = true;
  (ready_ ? out_ : held_) = request.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  if (ready_) begin(limits_.timeout_s);
}

// Writes what the pipe takes. False: the process does not read any more.
bool Worker::write_some() {
  const auto count = ::write(to_.write, out_.data(), out_.size());
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  out_.erase(0, static_cast<std::size_t>(count));
  return true;
}

// Reads what is there. False: the process has ended or sends too much.
bool Worker::read_some() {
  char buffer[4096];
  const auto count = ::read(from_.read, buffer, sizeof buffer);
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  in_.append(buffer, static_cast<std::size_t>(count));
  return count > 0 && in_.size() <= kLongestAnswer;
}

// The process says that it is ready: the request that was held is sent. Otherwise what is wrong.
std::string Worker::greet(const std::string& line, const Json& json) {
  if (json.is_object() && json.contains("error")) return fmt::format("could not load: {}", json["error"].dump());
  if (!json.is_object() || json.value("ready", Json()) != true) {
    return fmt::format("began with {} instead of {{\"ready\": true}}", shown(line));
  }
  ready_ = true;
  out_ = std::exchange(held_, "");
  begin(limits_.timeout_s);
  return "";
}

std::optional<Worker::Reply> Worker::read_line() {
  const auto end = in_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  const auto line = in_.substr(0, end);
  const bool more = end + 1 < in_.size();
  in_.clear();
  auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!ready_ && !more) {
    const auto wrong = greet(line, json);
    return wrong.empty() ? std::nullopt : std::optional(Reply{.error = wrong, .usable = false});
  }
  if (more || !busy_ || !out_.empty() || !json.is_object() || !json.contains("id") || json["id"] != id_) {
    return Reply{.error = fmt::format("printed what is no answer: {}", shown(line)), .usable = false};
  }
  if (json.contains("error")) return Reply{.error = json["error"].dump()};
  return Reply{.answer = std::move(json)};
}

std::optional<Worker::Reply> Worker::advance(bool readable, bool writable) {
  bool alive = true;
  if (writable) alive = write_some();
  if (readable) alive = read_some() && alive;
  auto reply = read_line();
  if (!reply && !alive) {
    reply = {.error = ready_ ? "ended without an answer" : "ended before it was ready", .usable = false};
  } else if (!reply && seconds_left() <= 0) {
    reply = {.error = ready_ ? fmt::format("gave no answer within {} s and was ended", limits_.timeout_s)
                             : fmt::format("was not ready within {} s of its start and was ended; it has to write "
                                           "{{\"ready\": true}} once it has loaded",
                                           limits_.load_timeout_s),
             .usable = false};
  }
  if (reply) busy_ = false;
  return reply;
}

void wait_for_replies(std::vector<std::unique_ptr<Worker>>& workers,
                      const std::function<void(std::size_t worker, const Worker::Reply&)>& ended) {
  double soonest = 1;
  std::vector<pollfd> polled;  // two of each worker; those with fd = -1 are passed over
  for (const auto& worker : workers) {
    const bool busy = worker && worker->busy();
    polled.push_back(busy ? worker->reading() : pollfd{.fd = -1, .events = 0, .revents = 0});
    polled.push_back(busy ? worker->writing() : pollfd{.fd = -1, .events = 0, .revents = 0});
    if (busy) soonest = std::min(soonest, worker->seconds_left());
  }
  ::poll(polled.data(), polled.size(), static_cast<int>(std::ceil(1000 * std::max(soonest, 0.0))));
  for (std::size_t i = 0; i < workers.size(); ++i) {
    auto& worker = workers[i];
    if (!worker || !worker->busy()) continue;
    const auto reply = worker->advance(polled[2 * i].revents != 0, polled[2 * i + 1].revents != 0);
    if (!reply) continue;
    if (!reply->usable) worker.reset();
    ended(i, *reply);
  }
}

std::vector<std::unique_ptr<Worker>> start_workers(const std::vector<std::string>& command, std::int64_t count,
                                                   const WorkerLimits& limits) {
  ::signal(SIGPIPE, SIG_IGN);  // a process that died is an error of write(), not our end
  std::vector<std::unique_ptr<Worker>> workers;
  for (std::int64_t i = 0; i < count; ++i) workers.push_back(std::make_unique<Worker>(command, limits));
  for (const auto& worker : workers) {
    if (const auto why = worker->wait_until_ready(); !why.empty()) fail_usage("reward: {} {}", command[0], why);
  }
  return workers;
}

std::vector<std::string> python_worker(const std::string& code, const std::vector<std::string>& arguments) {
  std::vector<std::string> command{"python3", "-c", kPythonTools + code + kPythonLoop};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

std::vector<std::string> python_place(std::string_view option, const std::string& place) {
  const auto colon = place.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == place.size()) {
    fail_usage("{}: expected FILE.py:NAME, got {}", option, place);
  }
  const auto file = place.substr(0, colon);
  if (!std::filesystem::exists(file)) fail_usage("{}: there is no {}", option, file);
  return {file, place.substr(colon + 1)};
}

}  // namespace sluice
