// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/environment.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "sluice/core/error.h"
#include "sluice/core/log.h"

namespace sluice {
namespace {

using Json = nlohmann::ordered_json;

constexpr auto kPythonClass = R"py(
def load(path, name):
    make, episodes = find(path, name), {}
    def respond(request):
        number, task = request.pop("episode"), request.pop("task")
        if task == "begin":
            episodes[number] = make(**request)
            return {}
        episode = episodes.pop(number, None)
        if task == "end":
            return {}
        if episode is None:
            raise RuntimeError("the process that held the episode has ended")
        observation, reward, done = episode.step(request["completion"])
        if not done:
            if not isinstance(observation, str):
                raise TypeError(f"the observation is a {type(observation).__name__} and not a str")
            episodes[number] = episode
        return {"observation": "" if done else observation, "reward": finite(reward), "done": bool(done)}
    return respond
)py";

// Stands for a turn of the model in a conversation that is rendered to see what follows one.
constexpr std::string_view kAnswer = "sluice's place for an answer";

}  // namespace

Environment::Environment(const EnvironmentOptions& options)
    : command_(python_worker(kPythonClass, python_place("environment.python", *options.python))),
      limits_{
          .load_timeout_s = options.load_timeout_s, .timeout_s = options.timeout_s, .memory_gib = options.memory_gib},
      max_turns_(options.max_turns),
      workers_(start_workers(command_, options.workers, limits_)) {}

void Environment::fail(const Json& request, const std::string& why) {
  ++failures_;
  last_failure_ = why;
  log_warning("environment: episode {}: {}", request.at("episode").get<std::int64_t>(), why);
}

// Each request goes to the worker of its episode. None where it failed.
std::vector<std::optional<Json>> Environment::ask(std::vector<Json> requests) {
  std::vector<std::optional<Json>> answers(requests.size());
  std::vector<std::deque<std::size_t>> waiting(workers_.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto episode = requests[i].at("episode").get<std::int64_t>();
    waiting[static_cast<std::size_t>(episode) % workers_.size()].push_back(i);
  }
  auto open = requests.size();
  while (open > 0) {
    for (std::size_t i = 0; i < workers_.size(); ++i) {
      auto& worker = workers_[i];
      if (waiting[i].empty() || (worker && worker->busy())) continue;
      if (!worker) worker = std::make_unique<Worker>(command_, limits_);
      worker->send(requests[waiting[i].front()]);
    }
    wait_for_replies(workers_, [&](std::size_t i, const Worker::Reply& reply) {
      const auto request = waiting[i].front();
      waiting[i].pop_front();
      --open;
      if (reply.error.empty()) answers[request] = reply.answer;
      else fail(requests[request], reply.error);
    });
  }
  return answers;
}

std::vector<std::optional<std::int64_t>> Environment::begin(std::span<const Prompt* const> prompts) {
  std::vector<Json> requests;
  for (const auto* prompt : prompts) {
    requests.push_back({{"task", "begin"},
                        {"episode", next_episode_ + std::ssize(requests)},
                        {"prompt", prompt->text},
                        {"answer", prompt->answer},
                        {"record", prompt->record}});
  }
  const auto answers = ask(std::move(requests));
  std::vector<std::optional<std::int64_t>> episodes;
  for (const auto& answer : answers) {
    episodes.push_back(answer ? std::optional(next_episode_) : std::nullopt);
    ++next_episode_;
  }
  return episodes;
}

std::vector<std::optional<Environment::Outcome>> Environment::step(std::span<const Turn> turns) {
  std::vector<Json> requests;
  for (const auto& turn : turns) {
    requests.push_back({{"task", "step"}, {"episode", turn.episode}, {"completion", turn.completion}});
  }
  std::vector<std::optional<Outcome>> outcomes;
  for (const auto& answer : ask(std::move(requests))) {
    outcomes.emplace_back();
    if (!answer) continue;
    outcomes.back() = {.observation = answer->at("observation").get<std::string>(),
                       .reward = answer->at("reward").get<double>(),
                       .done = answer->at("done").get<bool>()};
  }
  return outcomes;
}

void Environment::end(std::span<const std::int64_t> episodes) {
  std::vector<Json> requests;
  for (const auto episode : episodes) requests.push_back({{"task", "end"}, {"episode", episode}});
  ask(std::move(requests));
}

TurnGlue::TurnGlue(const std::filesystem::path& model_folder, const PromptOptions& options)
    : options_(options),
      template_(ChatTemplate::load(model_folder, options.chat_template)),
      encoder_(Tokenizer::load(model_folder), SpecialTokens::kLiteral) {}

std::vector<TokenId> TurnGlue::between(TokenId last, const std::string& observation) const {
  if (!options_.chat) return encoder_.tokenizer().encode(observation, SpecialTokens::kLiteral);
  const Chat chat{Json::array({{{"role", "user"}, {"content", ""}},
                               {{"role", "assistant"}, {"content", std::string(kAnswer)}},
                               {{"role", "user"}, {"content", observation}}}),
                  nullptr, nullptr};
  const auto rendered =
      template_.render(chat, {.add_generation_prompt = true, .enable_thinking = options_.thinking}).text;
  const auto encoded = encoder_.encode(rendered);
  const auto answer = rendered.str().find(kAnswer);
  const auto end = std::ranges::find_if(encoded.pieces, [&](const EncodedText::Piece& piece) {
    return piece.is_control && piece.begin == answer + kAnswer.size();
  });
  if (answer == std::string::npos || end == encoded.pieces.end()) {
    fail_data(
        "environment: {} does not end an assistant's turn with a control token right behind its text; turns of "
        "several cannot be told apart",
        template_.name());
  }
  const auto first = encoded.tokens.begin() + static_cast<std::ptrdiff_t>(end->first_token);
  return {last == *first ? first + 1 : first, encoded.tokens.end()};
}

}  // namespace sluice
