// SPDX-License-Identifier: Apache-2.0
#include "sluice/rl/trainer.h"

#include <algorithm>
#include <cmath>

#include "sluice/core/files.h"
#include "sluice/core/log.h"
#include "sluice/core/signals.h"
#include "sluice/kernels/common/device.h"
#include "sluice/rl/token_advantages.h"
#include "sluice/train/run_folder.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr std::int64_t kMostIdleSteps = 10;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Adds the time until it ends to `seconds`.
class Timed {
 public:
  explicit Timed(double& seconds) : seconds_(seconds) {}
  ~Timed() { seconds_ += seconds_since(begin_); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  double& seconds_;
  Clock::time_point begin_ = Clock::now();
};

std::int64_t longest_prompt(const std::vector<Prompt>& prompts) {
  std::int64_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, std::ssize(prompt.tokens));
  return longest;
}

EngineSizes engine_sizes(const RlOptions& options, const RlInputs& inputs) {
  const auto answers = std::max(options.rollout.prompts * options.rollout.samples,
                                std::ssize(inputs.eval_prompts) * options.eval.samples);
  const auto slots = std::min(options.rollout.slots, answers);
  const auto single_turn =
      std::max(longest_prompt(inputs.prompts), longest_prompt(inputs.eval_prompts)) + options.rollout.max_tokens;
  return {.slots = slots,
          .capacity = inputs.surroundings != nullptr ? options.train.seq_len : single_turn,
          .tokens_per_step = std::max<std::int64_t>(512, slots)};
}

std::unique_ptr<ValueHead> make_value_head(const RlOptions& options, const Decoder& decoder) {
  if (algorithm_settings(options.objective).advantage != Advantage::kGae) return nullptr;
  auto head = std::make_unique<ValueHead>(decoder.head().size(1));
  initialize(head->parameters(), kFloat, static_cast<std::uint64_t>(options.seed));
  for (auto* parameter : head->parameters()) parameter->value = parameter->value.to(decoder.device());
  return head;
}

// The model's, or its adapters', and the value head's.
std::vector<Parameter*> all_trained(const Model& model, const ValueHead* value_head) {
  auto parameters = trained_parameters(model, MtpTraining::kOff);
  if (value_head != nullptr) {
    for (auto* parameter : value_head->parameters()) parameters.push_back(parameter);
  }
  return parameters;
}

AdamWSettings optimizer_settings(const RlOptions& options, const ValueHead* value_head) {
  auto settings = adamw_settings(options.optim);
  if (value_head != nullptr) {
    for (const auto* parameter : value_head->parameters()) {
      settings.lr_ratios[parameter->name] = options.objective.value_lr_ratio;
    }
  }
  return settings;
}

bool is_truncated(const Response& response) { return response.completion.finish_reason == FinishReason::kLength; }

Json line_of(const Prompt& prompt, const Response& response, bool used) {
  Json line{{"place", prompt.place},
            {"prompt", prompt.text},
            {"completion", response.completion.text},
            {"answer", prompt.answer},
            {"reward", nullptr},
            {"rewards", Json::array()},
            {"advantage", nullptr},
            {"tokens", response.completion.logprobs.size()},
            {"turns", response.turns},
            {"finish_reason", is_truncated(response) ? "length" : "stop"},
            {"used", used}};
  if (response.advantage) line["advantage"] = *response.advantage;
  if (response.verdict) {
    line["reward"] = response.verdict->reward;
    line["rewards"] = response.verdict->parts;
  }
  return line;
}

// Mean, deviation and extremes of numbers that come one by one.
struct Summary {
  double count = 0, sum = 0, squares = 0, most = 0;
  void add(double value) {
    count += 1;
    sum += value;
    squares += value * value;
    most = count == 1 ? value : std::max(most, value);
  }
  double mean() const { return count > 0 ? sum / count : 0; }
  double deviation() const { return count > 0 ? std::sqrt(std::max(0.0, squares / count - mean() * mean())) : 0; }
};

}  // namespace

struct RlTrainer::Step {
  std::int64_t number;
  double lr;
  std::vector<AnswerGroup> groups;
  std::string lines;  // of rollouts/step_N.jsonl
  std::int64_t rounds = 0, reward_failures = 0;
  std::int64_t sampled_groups = 0;
  std::int64_t compared_groups = 0, uniform_groups = 0;  // with enough answers; of those, with one reward for all
  std::int64_t judged = 0, failed = 0;                   // answers
  std::int64_t sampled_tokens = 0, trained_tokens = 0;
  ReplayCoverage replay = {};
  double generate_s = 0, reward_s = 0, old_s = 0, reference_s = 0, update_s = 0, eval_s = 0;
  AdvantageStats advantages = {};
  PolicyStats stats = {};
  Summary grad_norm = {};
  Clock::time_point begin = Clock::now();
};

RlTrainer::RlTrainer(const RlOptions& options, const RlInputs& inputs)
    : options_(options),
      model_(inputs.model),
      reference_(inputs.reference),
      adapted_(inputs.adapters ? inputs.model.parameters() : std::vector<Parameter*>()),
      adapters_(inputs.adapters ? describe_adapters(inputs.model, inputs.adapters->settings) : nlohmann::json()),
      prompts_(inputs.prompts),
      eval_prompts_(inputs.eval_prompts),
      rewards_(inputs.rewards),
      surroundings_(inputs.surroundings),
      algorithm_(algorithm_settings(options.objective)),
      value_head_(make_value_head(options, *inputs.model.decoder)),
      stream_(inputs.prompts.size(), static_cast<std::uint64_t>(options.seed)),
      parameters_(prepare(all_trained(inputs.model, value_head_.get()), options.optim)),
      gradients_(parameters_),
      optimizer_(parameters_, optimizer_settings(options, value_head_.get()), one_process(),
                 offload_settings(options.mem.offload, options.run.out)),
      schedule_(make_schedule(options.optim, options.train.steps)),
      engine_(*inputs.model.decoder, inputs.tokenizer, inputs.stop_ids, engine_sizes(options, inputs)),
      policy_{.decoder = *inputs.model.decoder,
              .temperature = options.rollout.temperature,
              .vocabulary = engine_.drawable(),
              .value_head = value_head_.get()},
      first_step_(inputs.state ? inputs.state->step + 1 : 1),
      metrics_(options.run.out / "metrics.jsonl", inputs.state ? inputs.state->step : -1),
      checkpoints_(options.run.out, {.keep_last = options.ckpt.keep_last, .keep_every = options.ckpt.keep_every}) {
  model_.decoder->set_recompute(options.mem.recompute ? Recompute::kBlocks : Recompute::kNone);
  std::filesystem::create_directories(options.run.out / "rollouts");
  if (inputs.state) {
    const auto& meta = inputs.state->meta;
    updates_ = meta.at("updates").get<std::int64_t>();
    streams_ = meta.at("streams").get<std::uint64_t>();
    idle_steps_ = meta.at("idle_steps").get<std::int64_t>();
    optimizer_.restore(inputs.state->tensors, updates_);
    stream_.restore(meta.at("data").get<DataPosition>());
  }
}

ExitCode RlTrainer::run() {
  const StopSignals stop;
  begin_ = Clock::now();
  if (first_step_ == 1 && !eval_prompts_.empty()) metrics_.write(0, evaluate_now(0));
  for (auto number = first_step_; number <= schedule_.total_steps; ++number) {
    Step step{.number = number, .lr = learning_rate(schedule_, number), .groups = {}, .lines = {}};
    sample(step);
    train(step);
    finish(step);
    const bool stopping = stop.requested() && number < schedule_.total_steps;
    if (stopping || due(number, options_.ckpt.interval, schedule_.total_steps)) save(number);
    if (stopping) {
      checkpoints_.wait();
      log_warning("stopped on request after step {}; --ckpt.resume auto goes on", number);
      return ExitCode::kRequeue;
    }
  }
  checkpoints_.wait();
  return ExitCode::kDone;
}

// Fills the step's groups: sampled, judged, with advantages.
void RlTrainer::sample(Step& step) {
  const auto& rollout = options_.rollout;
  const GenerationSettings settings{.samples = rollout.samples,
                                    .max_tokens = rollout.max_tokens,
                                    .temperature = rollout.temperature,
                                    .seed = static_cast<std::uint64_t>(options_.seed),
                                    .longest = longest_episode(),
                                    .keep_experts = rollout.router_replay,
                                    .keep_key_blocks = rollout.index_replay};
  const auto write = [&](const AnswerGroup& group, const Response& response, bool used) {
    step.lines += line_of(prompts_[group.prompt], response, used).dump(-1, ' ', false, Json::error_handler_t::replace);
    step.lines += "\n";
  };
  const auto failures = [&] {
    return rewards_.failures() + (surroundings_ != nullptr ? surroundings_->environment.failures() : 0);
  };
  const auto failures_before = failures();
  while (std::ssize(step.groups) < rollout.prompts) {
    if (step.rounds == (rollout.dynamic_sampling ? rollout.max_rounds : 1)) break;
    ++step.rounds;
    const auto chosen = stream_.next(rollout.prompts - std::ssize(step.groups));
    std::vector<AnswerGroup> groups;
    {
      const Timed timed(step.generate_s);
      groups = sample_groups(engine_, prompts_, chosen, settings, streams_, surroundings_);
    }
    streams_ += chosen.size() * static_cast<std::uint64_t>(rollout.samples);
    {
      const Timed timed(step.reward_s);
      judge(groups, prompts_, rewards_);
    }
    for (auto& group : groups) {
      for (const auto& response : group.responses) step.sampled_tokens += std::ssize(response.completion.logprobs);
      const auto unjudged = take_unjudged(group);
      for (const auto& response : unjudged) write(group, response, /*used=*/false);
      step.failed += std::ssize(unjudged);
      step.judged += std::ssize(group.responses);
      // With a value head an answer counts alone; otherwise a group needs two, where more than one is sampled.
      const bool too_few = std::ssize(group.responses) < (value_head_ ? 1 : std::min<std::int64_t>(rollout.samples, 2));
      ++step.sampled_groups;
      if (!too_few) {
        if (!value_head_) set_advantages(group, algorithm_.advantage);
        ++step.compared_groups;
        step.uniform_groups += has_no_spread(group) ? 1 : 0;
      }
      const bool used = !too_few && !(rollout.dynamic_sampling && has_no_signal(group));
      for (const auto& response : group.responses) write(group, response, used);
      if (used) step.groups.push_back(std::move(group));
    }
  }
  step.reward_failures = failures() - failures_before;
  if (step.failed > 0) {
    log_warning("step {}: {} answers could not be judged and are left out", step.number, step.failed);
  }
  if (step.judged == 0) {
    const auto by_environment = surroundings_ != nullptr ? surroundings_->environment.last_failure() : "";
    fail(ExitCode::kRuntime, "step {}: no answer could be judged; the reward's last failure: {}", step.number,
         by_environment.empty() ? rewards_.last_failure() : by_environment);
  }
  if (rollout.dynamic_sampling && std::ssize(step.groups) < rollout.prompts) {
    const auto found = step.groups.empty() ? std::string("every group was uniform")
                                           : fmt::format("{} groups of {} differ", step.groups.size(), rollout.prompts);
    fail(ExitCode::kRuntime,
         "step {}: after {} rounds of dynamic sampling {}: their answers all have the same first reward.\n"
         "  Take prompts that the model answers neither always nor never, or raise rollout.max_rounds.",
         step.number, step.rounds, found);
  }
}

std::vector<TrainedResponse> RlTrainer::responses_of(const std::vector<AnswerGroup>& groups) const {
  std::vector<TrainedResponse> responses;
  for (const auto& group : groups) {
    const auto& prompt = prompts_[group.prompt];
    for (const auto& response : group.responses) {
      const auto& tokens = response.completion.tokens;
      Sample sample{.tokens = prompt.tokens, .loss_mask = {}, .place = prompt.place};
      sample.tokens.insert(sample.tokens.end(), tokens.begin(), tokens.end());
      sample.loss_mask.resize(prompt.tokens.size(), 0);
      sample.loss_mask.insert(sample.loss_mask.end(), response.sampled.begin(), response.sampled.end());
      responses.push_back({.sample = std::move(sample),
                           .rollout_logprobs = at::tensor(response.completion.logprobs, kFloat),
                           .experts = response.completion.experts,
                           .key_blocks = response.completion.key_blocks,
                           .reward = response.verdict->reward,
                           .group_advantage = response.advantage.value_or(0),
                           .counted = !(options_.objective.mask_truncated && is_truncated(response))});
    }
  }
  return responses;
}

// What the objective compares with: the model before the step, where one update does not find that by itself, and the
// reference; and the advantages that follow.
void RlTrainer::score(Step& step, std::vector<std::vector<TrainedResponse*>>& minibatches) {
  const bool needs_old = value_head_ || options_.train.minibatches * options_.train.passes > 1;
  std::vector<TrainedResponse*> all;
  for (auto& minibatch : minibatches) {
    const auto packs = pack_responses(minibatch, options_.train.seq_len);
    if (needs_old) {
      const Timed timed(step.old_s);
      const auto scores = score_responses(policy_, minibatch, packs, /*replay=*/true);
      for (std::size_t i = 0; i < minibatch.size(); ++i) {
        minibatch[i]->old_logprobs = scores[i].logprobs;
        minibatch[i]->old_values = scores[i].values;
      }
    }
    if (options_.objective.kl_coef > 0) {
      const Timed timed(step.reference_s);
      const WithoutAdapters base(adapted_);
      const Policy reference{.decoder = reference_ != nullptr ? *reference_ : policy_.decoder,
                             .temperature = policy_.temperature,
                             .vocabulary = policy_.vocabulary};
      const auto scores = score_responses(reference, minibatch, packs, /*replay=*/false);
      for (std::size_t i = 0; i < minibatch.size(); ++i) minibatch[i]->reference_logprobs = scores[i].logprobs;
    }
    all.insert(all.end(), minibatch.begin(), minibatch.end());
  }
  step.advantages = set_token_advantages(all, algorithm_);
}

void RlTrainer::train(Step& step) {
  // Groups stay whole: minibatch m of M has the groups from m G / M to (m + 1) G / M.
  std::vector<std::vector<TrainedResponse>> held;
  std::vector<std::vector<TrainedResponse*>> minibatches;
  const auto groups = std::ssize(step.groups), count = std::min(options_.train.minibatches, groups);
  for (std::int64_t m = 0; m < count; ++m) {
    held.push_back(
        responses_of({step.groups.begin() + m * groups / count, step.groups.begin() + (m + 1) * groups / count}));
    const auto replay = check_replay(held.back(), options_.rollout.strict_replay);
    step.replay.tokens += replay.tokens;
    step.replay.missing += replay.missing;
    minibatches.emplace_back();
    for (auto& response : held.back()) {
      minibatches.back().push_back(&response);
      step.trained_tokens += std::ssize(response.sample.tokens);
    }
  }
  score(step, minibatches);
  const Timed timed(step.update_s);
  bool changed = false;
  for (std::int64_t pass = 0; pass < options_.train.passes; ++pass) {
    for (const auto& minibatch : minibatches) {
      const auto found =
          update_policy(policy_, algorithm_, minibatch, options_.train.seq_len, options_.rollout.max_tokens, gradients_,
                        optimizer_, {.step = step.number, .lr = step.lr, .clip_norm = options_.optim.clip_norm});
      if (found.skipped) continue;
      changed = true;
      ++updates_;
      step.stats.add(found.stats);
      step.grad_norm.add(found.grad_norm);
    }
  }
  idle_steps_ = changed ? 0 : idle_steps_ + 1;
  if (idle_steps_ == kMostIdleSteps) {
    fail(ExitCode::kRuntime, "step {}: no token to train on in {} steps in a row; all answers reach rollout.max_tokens",
         step.number, idle_steps_);
  }
}

void RlTrainer::finish(Step& step) {
  write_file(options_.run.out / "rollouts" / fmt::format("step_{}.jsonl", step.number), step.lines);
  Summary reward, length, turns, truncated;
  std::vector<Summary> parts(options_.reward.size());
  for (const auto& group : step.groups) {
    for (const auto& response : group.responses) {
      reward.add(response.verdict->reward);
      for (std::size_t i = 0; i < parts.size(); ++i) parts[i].add(response.verdict->parts[i]);
      length.add(static_cast<double>(response.completion.logprobs.size()));
      turns.add(static_cast<double>(response.turns));
      truncated.add(is_truncated(response) ? 1 : 0);
    }
  }
  const auto& s = step.stats;
  const auto per_token = [&](double sum) { return s.tokens > 0 ? sum / s.tokens : 0; };
  const auto per_update = [&](double sum) { return step.grad_norm.count > 0 ? sum / step.grad_norm.count : 0; };
  Json values{{"rollout/reward_mean", reward.mean()}, {"rollout/reward_std", reward.deviation()}};
  for (std::size_t i = 0; i < parts.size(); ++i) values[fmt::format("rollout/reward_{}", i)] = parts[i].mean();
  values.update(Json{
      {"rollout/length_mean", length.mean()},
      {"rollout/length_max", length.most},
      {"rollout/truncated_frac", truncated.mean()},
      {"rollout/zero_std_frac",
       static_cast<double>(step.uniform_groups) / static_cast<double>(std::max<std::int64_t>(step.compared_groups, 1))},
      {"rollout/rounds", step.rounds},
      {"rollout/groups", step.groups.size()},
      {"rollout/kept_frac", static_cast<double>(step.groups.size()) / static_cast<double>(step.sampled_groups)},
      {"rollout/failed", step.failed},
      {"rollout/reward_failures", step.reward_failures},
      {"rollout/dlogp_mean", per_token(s.mismatch)},
      {"rollout/dlogp_max", s.mismatch_max},
      {"rollout/mismatch_kl", per_token(s.mismatch_kl)},
      {"train/loss", per_update(s.loss)},
      {"train/policy_loss", per_update(s.policy_loss)},
      {"train/entropy", per_token(s.entropy)},
      {"train/clip_low_frac", per_token(s.clipped_low)},
      {"train/clip_high_frac", per_token(s.clipped_high)},
      {"train/ppo_kl", per_token(s.old_minus_new)},
      {"train/ratio_max", s.ratio_max},
      {"train/advantage_mean", step.advantages.advantage_mean},
      {"train/advantage_max", step.advantages.advantage_max},
      {"train/grad_norm", step.grad_norm.mean()},
      {"train/lr", step.lr},
      {"train/updates", updates_}});
  if (surroundings_ != nullptr) values["rollout/turns_mean"] = turns.mean();
  if (s.routed > 0) values["rollout/router_differ_frac"] = s.rerouted / s.routed;
  if (step.replay.tokens > 0) {
    values["rollout/router_missing_frac"] =
        static_cast<double>(step.replay.missing) / static_cast<double>(step.replay.tokens);
  }
  if (s.indexed > 0) values["rollout/index_differ_frac"] = s.reindexed / s.indexed;
  if (options_.objective.kl_coef > 0) values["train/kl"] = per_token(s.kl);
  if (algorithm_.objective.clip.dual) values["train/dual_clip_frac"] = per_token(s.dual);
  if (value_head_) {
    values.update(Json{{"train/value_loss", per_update(s.value_loss)},
                       {"train/value_clip_frac", per_token(s.value_clipped)},
                       {"train/value_mean", step.advantages.value_mean},
                       {"train/return_mean", step.advantages.return_mean},
                       {"train/explained_variance", step.advantages.explained_variance}});
  }
  if (options_.objective.correction != Correction::kNone) {
    values["train/correction_mean"] = per_token(s.correction);
    values["train/correction_max"] = s.correction_max;
    values["train/correction_zero_frac"] = per_token(s.correction_zero);
    values["train/correction_ess"] =
        s.correction_square > 0 ? per_token(s.correction * s.correction / s.correction_square) : 0;
  }
  if (s.mismatch_max > 1e-2 && policy_.decoder.head().scalar_type() == kFloat) {
    log_warning(
        "step {}: sampling and training differ by up to {:.2g} in a log-probability; in float32 they should "
        "not differ by more than 1e-3",
        step.number, s.mismatch_max);
  }
  const auto step_s = seconds_since(step.begin);
  const auto memory = peak_memory_bytes(policy_.decoder.device());
  const auto tokens_per_s = static_cast<double>(step.trained_tokens) / step_s;
  const auto mean_step_s = seconds_since(begin_) / static_cast<double>(step.number - first_step_ + 1);
  progress_.step({.step = step.number,
                  .steps = schedule_.total_steps,
                  .loss = per_update(s.loss),
                  .grad_norm = step.grad_norm.mean(),
                  .further = {fmt::format("reward {:.3f}", reward.mean()), fmt::format("len {:.1f}", length.mean())},
                  .lr = step.lr,
                  .tokens_per_s = tokens_per_s,
                  .memory_bytes = static_cast<double>(memory),
                  .step_s = step_s,
                  .eta_s = mean_step_s * static_cast<double>(schedule_.total_steps - step.number)});
  if (!eval_prompts_.empty() && due(step.number, options_.eval.interval, schedule_.total_steps)) {
    const Timed timed(step.eval_s);
    values.update(evaluate_now(step.number));
  }
  values.update(Json{{"data/epoch", stream_.position().epoch},
                     {"perf/generate_s", step.generate_s},
                     {"perf/reward_s", step.reward_s},
                     {"perf/old_s", step.old_s},
                     {"perf/reference_s", step.reference_s},
                     {"perf/update_s", step.update_s},
                     {"perf/eval_s", step.eval_s},
                     {"perf/step_s", step_s},
                     {"perf/tokens_per_s", tokens_per_s},
                     {"perf/rollout_tokens_per_s", static_cast<double>(step.sampled_tokens) / step.generate_s},
                     {"mem/peak_gib", static_cast<double>(memory) / (1 << 30)}});
  metrics_.write(step.number, values);
}

Json RlTrainer::evaluate_now(std::int64_t step) {
  const auto& eval = options_.eval;
  auto values = evaluate(engine_, eval_prompts_, rewards_, surroundings_,
                         {.samples = eval.samples,
                          .max_tokens = options_.rollout.max_tokens,
                          .temperature = eval.temperature,
                          .seed = static_cast<std::uint64_t>(options_.seed) + 1,
                          .longest = longest_episode()});
  log_info("step {}: eval avg@{} {:.4f}, mean length {:.1f}, {} prompts", step, eval.samples,
           values.at(fmt::format("eval/avg@{}", eval.samples)).get<double>(),
           values.at("eval/length_mean").get<double>(), eval_prompts_.size());
  return values;
}

void RlTrainer::save(std::int64_t step) {
  const TrainingState state{.step = step,
                            .meta = {{"settings", maths_settings(options_)},
                                     {"samples", fingerprint(prompts_)},
                                     {"adapters", adapters_},
                                     {"data", stream_.position()},
                                     {"streams", streams_},
                                     {"updates", updates_},
                                     {"idle_steps", idle_steps_}},
                            .tensors = optimizer_.state()};
  if (options_.mem.offload == Offload::kDisk) checkpoints_.save_now(state);  // a copy might not find room in memory
  else checkpoints_.save(state);
}

}  // namespace sluice
