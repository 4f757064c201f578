// SPDX-License-Identifier: Apache-2.0
// Every setting of a run of reinforcement learning that supervised fine-tuning does not have, declared where it is
// held.
#pragma once

#include "sluice/rl/advantages.h"
#include "sluice/rl/objectives.h"
#include "sluice/train/options.h"

namespace sluice {

struct PromptOptions {
  std::filesystem::path path;
  std::optional<std::string> prompt_key, answer_key;
  bool chat = true;
  std::optional<std::string> system;
  std::optional<bool> thinking;
  std::optional<std::filesystem::path> chat_template;
  void describe(OptionList& option) {
    option("path", path, "prompts to train on: JSONL or a JSON array, each record with a prompt and mostly an answer",
           {.synonyms = {"dataset", "train_file", "data_path", "prompt_data"}, .required = true, .input = true});
    option("prompt_key", prompt_key, "key of the prompt, text or messages; none: prompt, question or messages",
           {.synonyms = {"input_key"}});
    option("answer_key", answer_key, "key of the answer; none: answer, label or ground_truth",
           {.synonyms = {"label_key"}});
    option("chat", chat, "a prompt that is text is a user's message, put into the chat template; otherwise plain text");
    option("system", system, "system message before each chat that begins without one");
    option("thinking", thinking, "reasoning before the answer, where the template knows it; none: its default",
           {.synonyms = {"enable_thinking"}});
    option("chat_template", chat_template, "template file instead of the model folder's own", {.input = true});
  }
};

struct RolloutOptions {
  std::int64_t prompts = 8;
  std::int64_t samples = 8;
  std::int64_t max_tokens = 256;
  double temperature = 1;
  std::int64_t slots = 64;
  bool dynamic_sampling = false;
  std::int64_t max_rounds = 10;
  bool router_replay = false, index_replay = false, strict_replay = false;
  void describe(OptionList& option) {
    option("prompts", prompts, "prompts of a step", {.synonyms = {"rollout_batch_size", "train_batch_size"}, .min = 1});
    option("samples", samples, "answers to each prompt: its group",
           {.synonyms = {"group_size", "num_generations", "n_samples_per_prompt", "rollout.n"}, .min = 1});
    option(
        "max_tokens", max_tokens, "most tokens of an answer",
        {.unit = "tokens", .synonyms = {"max_response_length", "max_completion_length", "max_new_tokens"}, .min = 1});
    option("temperature", temperature, "of the draws; training scores tokens at the same", {.min = 0.01});
    option("slots", slots, "sequences sampled at once", {.synonyms = {"max_num_seqs"}, .min = 1});
    option("dynamic_sampling", dynamic_sampling,
           "drop groups whose answers all have one first reward, and sample others in their place",
           {.synonyms = {"filter_groups"}});
    option("max_rounds", max_rounds, "most rounds of dynamic sampling in a step; more is an error",
           {.synonyms = {"max_num_gen_batches"}, .min = 1});
    option("router_replay", router_replay,
           "training sends each token to the experts that it went to while sampling, where the model has experts",
           {.synonyms = {"use_rollout_routing_replay", "routing_replay"}});
    option("index_replay", index_replay,
           "training attends to the blocks of keys that sampling attended to, where the model has sparse attention",
           {.synonyms = {"use_rollout_indexer_replay", "indexer_replay"}});
    option("strict_replay", strict_replay,
           "with router_replay, a token of which it is not known where sampling sent it is an error; otherwise it goes "
           "anew and is counted");
  }
};

enum class RewardKind {
  kExactMatch,
  kGsm8k,
  kGsm8kFlexible,
  kMath,
  kFormat,
  kLength,
  kReasoningGym,
  kEnvironment,
  kPython,
  kCommand
};

struct RewardOptions {
  RewardKind kind = RewardKind::kExactMatch;
  double weight = 1;
  std::optional<std::string> pattern;
  std::int64_t buffer = 0;
  std::optional<std::string> python;
  std::vector<std::string> command;
  std::int64_t workers = 1;
  double load_timeout_s = 60;
  double timeout_s = 10;
  double memory_gib = 4;
  std::int64_t retries = 2;
  void describe(OptionList& option) {
    option("kind", kind,
           "what gives the reward; the first one is the task's own: it judges evaluations and dynamic sampling",
           {.choices = {"exact_match", "gsm8k", "gsm8k_flexible", "math", "format", "length", "reasoning_gym",
                        "environment", "python", "command"}});
    option("weight", weight, "of this reward in the sum");
    option("pattern", pattern, "for kind = format: 1 where this regular expression matches the whole answer, else 0");
    option("buffer", buffer, "for kind = length: tokens before rollout.max_tokens over which it falls from 0 to -1",
           {.unit = "tokens", .synonyms = {"overlong_buffer_len"}, .min = 0});
    option("python", python, "for kind = python: FILE.py:FUNCTION, called with prompt, completion, answer, record");
    option("command", command, "for kind = command: program and arguments; requests and rewards are lines of JSON");
    option("workers", workers, "processes of a reasoning_gym, python or command reward", {.min = 1});
    option("load_timeout_s", load_timeout_s, "time for such a process from its start until it is ready",
           {.unit = "s", .min = 0.01});
    option("timeout_s", timeout_s, "time for one answer of such a process", {.unit = "s", .min = 0.01});
    option("memory_gib", memory_gib, "address space of such a process", {.unit = "GiB", .min = 0.05});
    option("retries", retries, "further tries before an answer that could not be judged is dropped", {.min = 0});
  }
};

struct EnvironmentOptions {
  std::optional<std::string> python;
  std::int64_t max_turns = 8;
  std::int64_t workers = 1;
  double load_timeout_s = 60;
  double timeout_s = 10;
  double memory_gib = 4;
  void describe(OptionList& option) {
    option(
        "python", python,
        "FILE.py:CLASS, an object of which is an episode: made with prompt, answer, record; step(completion) returns "
        "observation, reward, done; none: answers are single turns");
    option("max_turns", max_turns, "most turns of the model in an episode", {.min = 1});
    option("workers", workers, "processes that hold the episodes", {.min = 1});
    option("load_timeout_s", load_timeout_s, "time for such a process from its start until it is ready",
           {.unit = "s", .min = 0.01});
    option("timeout_s", timeout_s, "time for one step of an episode", {.unit = "s", .min = 0.01});
    option("memory_gib", memory_gib, "address space of such a process", {.unit = "GiB", .min = 0.05});
  }
};

enum class Algorithm { kGrpo, kDapo, kDrGrpo, kGspo, kCispo, kPpo };

struct ObjectiveOptions {
  Algorithm algorithm = Algorithm::kGrpo;
  std::optional<Advantage> advantage;
  std::optional<bool> whiten;
  double gamma = 1, gae_lambda = 1;
  double value_coef = 0.1, value_clip = 0.2, value_lr_ratio = 10;
  std::optional<double> clip_low, clip_high, dual_clip;
  std::optional<Aggregation> aggregation;
  double entropy_coef = 0;
  double kl_coef = 0;
  KlEstimate kl = KlEstimate::kK3;
  Correction correction = Correction::kNone;
  double correction_low = 0.5, correction_high = 2;
  bool mask_truncated = false;
  void describe(OptionList& option) {
    option(
        "algorithm", algorithm, "sets advantage, clipping and aggregation where they are not given",
        {.synonyms = {"loss_type", "adv_estimator"}, .choices = {"grpo", "dapo", "dr_grpo", "gspo", "cispo", "ppo"}});
    option("advantage", advantage,
           "(r - mean) / std of the group, r - mean, r - mean of the others, or each token's by a value head",
           {.choices = {"group", "group_mean", "leave_one_out", "gae"}});
    option("whiten", whiten, "advantages of a step's tokens are brought to mean 0 and variance 1; none: with gae",
           {.synonyms = {"whiten_advantages", "normalize_advantages"}});
    option("gamma", gamma, "with gae: what a reward loses a token before it is earned", {.min = 0, .max = 1});
    option("gae_lambda", gae_lambda, "with gae: 1 trusts the rewards that came, 0 the value of the next token",
           {.synonyms = {"lam", "lambd", "lambda"}, .min = 0, .max = 1});
    option("value_coef", value_coef, "with gae: weight of the value head's loss",
           {.synonyms = {"vf_coef", "value_loss_coef"}, .min = 0});
    option("value_clip", value_clip, "with gae: how far a value moves in a step before its loss stops to pull",
           {.synonyms = {"cliprange_value", "value_clip_range"}, .min = 0});
    option("value_lr_ratio", value_lr_ratio, "with gae: learning rate of the value head, times optim.lr",
           {.synonyms = {"critic_lr"}, .min = 0});
    option("clip_low", clip_low, "the ratio of probabilities is kept above 1 - this",
           {.synonyms = {"epsilon", "eps_clip", "clip_ratio", "clip_ratio_low"}, .min = 0});
    option("clip_high", clip_high, "and below 1 + this",
           {.synonyms = {"epsilon_high", "eps_clip_high", "clip_ratio_high"}, .min = 0});
    option("dual_clip", dual_clip, "with a negative advantage the loss is at most this times its size; none: no limit",
           {.synonyms = {"clip_ratio_c", "eps_clip_c"}, .min = 1});
    option("aggregation", aggregation, "how the losses of a step's tokens become one number",
           {.synonyms = {"loss_agg_mode"},
            .choices = {"token_mean", "sequence_mean", "sequence_sum", "sequence_sum_fixed"}});
    option("entropy_coef", entropy_coef, "weight of the entropy that the loss rewards, in nats a token",
           {.synonyms = {"entropy_coeff", "ent_coef"}, .min = 0});
    option("kl_coef", kl_coef, "weight of the KL divergence from the model that the run began with; 0: not computed",
           {.synonyms = {"beta", "kl_loss_coef"}, .min = 0});
    option("kl", kl, "its estimate", {.synonyms = {"kl_loss_type"}, .choices = {"k1", "k2", "k3"}});
    option(
        "correction", correction,
        "weights the losses by how much likelier training finds a token, or the whole answer, than sampling did",
        {.synonyms = {"tis", "rollout_is"}, .choices = {"none", "token", "sequence", "token_mask", "sequence_mask"}});
    option("correction_low", correction_low, "smallest such ratio that a mask lets through", {.min = 0});
    option("correction_high", correction_high, "largest one; without a mask it is cut to this",
           {.synonyms = {"tis_imp_ratio_cap"}, .min = 0});
    option("mask_truncated", mask_truncated, "answers cut off at rollout.max_tokens are not trained on",
           {.synonyms = {"overlong_filtering", "mask_truncated_completions"}});
  }
};

struct RlTrainOptions {
  std::int64_t steps = 100;
  std::int64_t minibatches = 1;
  std::int64_t passes = 1;
  std::int64_t seq_len = 4096;
  void describe(OptionList& option) {
    option("steps", steps, "rounds of sampling and training, also after a resume",
           {.synonyms = {"max_steps", "num_rollout", "total_training_steps"}, .min = 1});
    option("minibatches", minibatches, "optimizer steps into which the groups of a step are divided",
           {.synonyms = {"ppo_mini_batch_size", "num_steps_per_rollout"}, .min = 1});
    option("passes", passes, "times that each group is trained on",
           {.synonyms = {"ppo_epochs", "num_iterations"}, .min = 1});
    option("seq_len", seq_len, "most tokens of one packed row, and of one prompt with its answer",
           {.unit = "tokens", .synonyms = {"max_tokens_per_gpu", "ppo_max_token_len_per_gpu"}, .min = 2});
  }
};

struct RlEvalOptions {
  std::optional<std::filesystem::path> data;
  std::int64_t interval = 0;
  std::int64_t samples = 1;
  double temperature = 0;
  void describe(OptionList& option) {
    option("data", data, "prompts to evaluate on, in the form of data.path",
           {.synonyms = {"val_file", "val_files", "eval_prompt_data"}, .input = true});
    option("interval", interval, "steps between evaluations; 0: one at the beginning and one at the end",
           {.unit = "steps", .synonyms = {"eval_interval", "test_freq"}, .min = 0});
    option("samples", samples, "answers to each prompt",
           {.synonyms = {"n_samples_per_eval_prompt", "val_kwargs.n"}, .min = 1});
    option("temperature", temperature, "of their draws; 0: the most probable token each time", {.min = 0});
  }
};

struct RlOptions {
  ModelOptions model;
  PromptOptions data;
  RolloutOptions rollout;
  EnvironmentOptions environment;
  std::vector<RewardOptions> reward;
  ObjectiveOptions objective;
  RlTrainOptions train;
  OptimOptions optim;
  PrecisionOptions precision;
  LoraOptions lora;
  MemoryOptions mem;
  CheckpointOptions ckpt;
  RlEvalOptions eval;
  RunOptions run;
  std::int64_t seed = 42;

  RlOptions() {
    optim.lr = 1e-6;
    optim.schedule = ScheduleShape::kConstant;
    optim.warmup_ratio = 0;
    optim.beta2 = 0.999;
  }
  void describe(OptionList& option) {
    option("model", model, "model");
    option("data", data, "prompts");
    option("rollout", rollout, "sampling");
    option("environment", environment, "episodes of several turns");
    option("reward", reward, "what an answer is worth");
    option("objective", objective, "what is minimised");
    option("train", train, "length of the run");
    option("optim", optim, "optimizer");
    option("precision", precision, "number formats");
    option("lora", lora, "low-rank adapters");
    option("mem", mem, "memory");
    option("ckpt", ckpt, "checkpoints");
    option("eval", eval, "evaluation");
    option("run", run, "the run itself");
    option("seed", seed, "seed of the order of prompts and of all draws", {.min = 0});
  }
};

// What the options of an objective come to, with everything filled in that its algorithm decides.
struct AlgorithmSettings {
  Advantage advantage;
  Aggregation aggregation;
  ObjectiveSettings objective;
  GaeSettings gae = {};
  bool whiten = false;
  double reward_kl_coef = 0;  // with kGae the KL divergence is subtracted from the rewards and no part of the loss
};
AlgorithmSettings algorithm_settings(const ObjectiveOptions& options);

}  // namespace sluice
