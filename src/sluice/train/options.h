// SPDX-License-Identifier: Apache-2.0
// Every setting of a training run, declared where it is held.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "sluice/core/options.h"
#include "sluice/data/dataset.h"
#include "sluice/kernels/common/device.h"
#include "sluice/train/offload.h"
#include "sluice/train/schedule.h"

namespace sluice {

struct ModelOptions {
  std::filesystem::path path;
  void describe(OptionList& option) {
    option("path", path, "model folder in Hugging Face form",
           {.synonyms = {"model_name_or_path", "base_model", "hf_checkpoint", "model.name"},
            .alias = "model",
            .required = true,
            .input = true});
  }
};

inline constexpr std::string_view kDeviceSentence =
    "where to compute; auto: an NVIDIA GPU that the kernels serve, if there is one, else the CPU";

enum class Precision { kFloat32, kBfloat16 };

struct PrecisionOptions {
  Precision dtype = Precision::kBfloat16;
  void describe(OptionList& option) {
    option(
        "dtype", dtype, "dtype of parameters and activations; masters, moments and gradient sums are float32",
        {.synonyms = {"bf16", "mixed_precision", "torch_dtype"}, .choices = {"float32", "bfloat16"}, .alias = "dtype"});
  }
};

struct DataOptions {
  std::filesystem::path path;
  std::int64_t seq_len = 2048;
  bool packing = true;
  OverLong over_long = OverLong::kTruncate;
  LossOn loss_on = LossOn::kAssistant;
  bool control_tokens = false;
  std::optional<std::filesystem::path> chat_template;
  void describe(OptionList& option) {
    option("path", path, "training samples: JSONL or a JSON array",
           {.synonyms = {"dataset", "train_file", "data_path"}, .required = true, .input = true});
    option("seq_len", seq_len, "most tokens of one packed row, and of one sample",
           {.unit = "tokens", .synonyms = {"seq_length", "sequence_len", "cutoff_len", "max_length"}, .min = 2});
    option("packing", packing, "several samples in a row, kept apart by their boundaries",
           {.synonyms = {"sample_packing", "neat_packing"}});
    option("over_long", over_long, "what becomes of a sample longer than seq_len",
           {.choices = {"truncate", "drop", "split"}});
    option("loss_on", loss_on, "which turns of a conversation are trained",
           {.synonyms = {"train_on_inputs", "train_on_prompt"}, .choices = {"assistant", "last_turn", "all"}});
    option("control_tokens", control_tokens,
           "text in messages that looks like a control token becomes one; otherwise it stays text");
    option("chat_template", chat_template, "template file instead of the model folder's own", {.input = true});
  }
};

enum class MtpTraining { kOff, kJoint, kOnly };

struct TrainOptions {
  std::optional<std::int64_t> steps;
  std::int64_t epochs = 1;
  std::int64_t tokens_per_step = 16384;
  std::optional<double> router_aux_loss_coef;
  MtpTraining mtp = MtpTraining::kOff;
  double mtp_loss_scale = 0.1;
  void describe(OptionList& option) {
    option("steps", steps, "optimizer steps in all, also after a resume; none: as many as the epochs need",
           {.synonyms = {"max_steps", "train_iters", "training.steps"}, .min = 1});
    option("epochs", epochs, "passes over the data when steps is not given",
           {.synonyms = {"num_train_epochs"}, .min = 1});
    option("tokens_per_step", tokens_per_step, "tokens of one optimizer step, in rows of at most seq_len",
           {.unit = "tokens", .synonyms = {"global_batch_size", "batch_size", "global_batch", "grad_accum"}, .min = 1});
    option("router_aux_loss_coef", router_aux_loss_coef,
           "weight of the load-balancing loss of a mixture of experts; none: as config.json asks",
           {.synonyms = {"aux_loss_coef", "moe_aux_loss_coeff"}, .min = 0});
    option("mtp", mtp, "train the model's multi-token prediction block: not, with the model, or it alone",
           {.synonyms = {"train_mtp", "mtp_num_layers"}, .choices = {"off", "joint", "only"}});
    option("mtp_loss_scale", mtp_loss_scale, "weight of the multi-token prediction loss beside the model's own",
           {.synonyms = {"mtp_loss_scaling_factor"}, .min = 0});
  }
};

struct OptimOptions {
  double lr = 1e-5;
  ScheduleShape schedule = ScheduleShape::kCosine;
  std::optional<std::int64_t> warmup_steps;
  double warmup_ratio = 0.03;
  double decay_ratio = 0.1;
  double min_lr_ratio = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.01;
  bool decay_qk_norm = false;
  double clip_norm = 1;
  void describe(OptionList& option) {
    option("lr", lr, "peak learning rate", {.synonyms = {"learning_rate"}, .min = 0});
    option("schedule", schedule, "course of the learning rate after the warm-up",
           {.synonyms = {"lr_decay_style", "lr_scheduler_type"}, .choices = {"constant", "linear", "cosine", "wsd"}});
    option("warmup_steps", warmup_steps, "steps from 0 to the peak; none: warmup_ratio of the run",
           {.unit = "steps", .synonyms = {"lr_warmup_iters"}, .min = 0});
    option("warmup_ratio", warmup_ratio, "part of the run that is warm-up",
           {.synonyms = {"lr_warmup_fraction"}, .min = 0, .max = 1});
    option("decay_ratio", decay_ratio, "part of the run in which wsd falls", {.min = 0, .max = 1});
    option("min_lr_ratio", min_lr_ratio, "lowest learning rate, as part of the peak",
           {.synonyms = {"min_lr", "cosine_min_lr_ratio"}, .min = 0, .max = 1});
    option("beta1", beta1, "decay of AdamW's first moment", {.synonyms = {"adam_beta1", "betas"}, .min = 0, .max = 1});
    option("beta2", beta2, "decay of AdamW's second moment", {.synonyms = {"adam_beta2"}, .min = 0, .max = 1});
    option("eps", eps, "AdamW's epsilon", {.synonyms = {"adam_eps", "adam_epsilon"}, .min = 0});
    option("weight_decay", weight_decay,
           "of matrices, embeddings and convolutions; never of norms, biases, A_log, dt_bias", {.min = 0});
    option("decay_qk_norm", decay_qk_norm, "also decay the query and key norms",
           {.synonyms = {"apply_wd_to_qk_layernorm"}});
    option("clip_norm", clip_norm, "largest norm of all gradients together; 0: no clipping",
           {.synonyms = {"clip_grad", "max_grad_norm", "max_norm"}, .min = 0});
  }
};

struct LoraOptions {
  std::optional<std::int64_t> rank;
  double alpha = 32;
  double dropout = 0;
  std::vector<std::string> targets{"all-linear"};
  std::optional<std::filesystem::path> adapter;
  bool wanted() const { return rank || adapter; }
  void describe(OptionList& option) {
    option("rank", rank, "train low-rank adapters of this rank instead of the model; none: all parameters",
           {.synonyms = {"lora_r", "lora_rank", "r"}, .min = 1});
    option("alpha", alpha, "an adapter's update is multiplied by alpha / rank", {.synonyms = {"lora_alpha"}, .min = 0});
    option("dropout", dropout, "part of its inputs that an adapter drops in training",
           {.synonyms = {"lora_dropout"}, .min = 0, .max = 0.99});
    option("targets", targets, "what gets an adapter: all-linear, or ends of module names such as q_proj",
           {.synonyms = {"lora_target_modules", "target_modules"}});
    option("adapter", adapter, "an adapter in PEFT's form to go on from, with its own rank, alpha and targets",
           {.input = true});
  }
};

struct MemoryOptions {
  bool recompute = false;
  Offload offload = Offload::kOff;
  void describe(OptionList& option) {
    option("recompute", recompute, "compute each block again in the backward pass instead of keeping its activations",
           {.synonyms = {"gradient_checkpointing", "activation_checkpoint", "recompute_granularity"}});
    option("offload", offload,
           "where the optimizer's masters and moments lie between steps: on the device, in the host's memory, or in a "
           "file of the run folder",
           {.synonyms = {"optimizer_cpu_offload", "optim_cpu_offload", "offload_optimizer"},
            .choices = {"off", "host", "disk"}});
  }
};

struct ParallelOptions {
  std::int64_t tp = 1, cp = 1, ep = 1;
  bool shard_gradients = false;
  double timeout = 600;
  void describe(OptionList& option) {
    option("tp", tp, "ranks among which a layer's heads and columns are split, with sequence parallelism",
           {.synonyms = {"tensor_model_parallel_size", "tensor_parallel_size", "sp"}, .min = 1});
    option("cp", cp, "ranks among which the tokens of a row are split",
           {.synonyms = {"context_parallel_degree", "context_parallel_size"}, .min = 1});
    option("ep", ep, "ranks among which experts are split; they are some of those of data and context",
           {.synonyms = {"expert_model_parallel_size", "expert_parallel_degree"}, .min = 1});
    option("shard_gradients", shard_gradients,
           "keep sums of gradients on the rank that updates their rows alone (ZeRO stage 2): less memory, but an "
           "exchange for each row of tokens instead of one a step",
           {.synonyms = {"zero_stage", "zero2"}});
    option("timeout", timeout, "longest wait for another process, at the start and in every exchange",
           {.unit = "s", .synonyms = {"distributed_timeout", "nccl_timeout"}, .min = 1});
  }
};

enum class Resume { kAuto, kNever };

struct CheckpointOptions {
  std::int64_t interval = 0;
  std::int64_t keep_last = 2;
  std::int64_t keep_every = 0;
  Resume resume = Resume::kNever;
  bool force = false;
  void describe(OptionList& option) {
    option("interval", interval, "steps between checkpoints; 0: one at the end",
           {.unit = "steps", .synonyms = {"save_interval", "save_steps"}, .min = 0});
    option("keep_last", keep_last, "newest checkpoints to keep", {.synonyms = {"save_total_limit"}, .min = 1});
    option("keep_every", keep_every, "also keep each checkpoint whose step is a multiple of this; 0: none",
           {.unit = "steps", .min = 0});
    option("resume", resume, "auto: go on from the newest complete checkpoint of run.out, or begin where there is none",
           {.synonyms = {"resume_from_checkpoint"}, .choices = {"auto", "never"}});
    option("force", force, "resume although settings of data or mathematics changed", {.saved = false});
  }
};

struct EvalOptions {
  std::optional<std::filesystem::path> data;
  double split = 0;
  std::int64_t interval = 0;
  void describe(OptionList& option) {
    option("data", data, "samples to evaluate on, in the form of data.path",
           {.synonyms = {"val_file", "validation_file"}, .input = true});
    option("split", split, "without eval.data: part of data.path that is kept back to evaluate on",
           {.min = 0, .max = 0.5});
    option("interval", interval, "steps between evaluations; 0: one at the end",
           {.unit = "steps", .synonyms = {"eval_interval", "eval_steps", "val.interval"}, .min = 0});
  }
};

struct RunOptions {
  std::filesystem::path out;
  bool overwrite = false;
  DeviceChoice device = DeviceChoice::kAuto;
  void describe(OptionList& option) {
    option("out", out, "run folder: config.toml, metrics.jsonl, checkpoints/, export/",
           {.synonyms = {"output_dir", "save", "out_dir"}, .required = true});
    option("overwrite", overwrite, "remove what is in the run folder and begin anew", {.saved = false});
    option("device", device, kDeviceSentence, {.choices = {"auto", "cpu", "cuda"}, .alias = "device"});
  }
};

struct SftOptions {
  ModelOptions model;
  DataOptions data;
  TrainOptions train;
  OptimOptions optim;
  PrecisionOptions precision;
  LoraOptions lora;
  MemoryOptions mem;
  ParallelOptions parallel;
  CheckpointOptions ckpt;
  EvalOptions eval;
  RunOptions run;
  std::int64_t seed = 42;
  void describe(OptionList& option) {
    option("model", model, "model");
    option("data", data, "training data");
    option("train", train, "length of the run");
    option("optim", optim, "optimizer");
    option("precision", precision, "number formats");
    option("lora", lora, "low-rank adapters");
    option("mem", mem, "memory");
    option("parallel", parallel, "how the processes share the work; the number of data ranks follows from theirs");
    option("ckpt", ckpt, "checkpoints");
    option("eval", eval, "evaluation");
    option("run", run, "the run itself");
    option("seed", seed, "seed of the order of samples", {.min = 0});
  }
};

}  // namespace sluice
