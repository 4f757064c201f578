// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/sft.h"

#include <algorithm>
#include <cmath>

#include "sluice/core/log.h"
#include "sluice/kernels/common/device.h"
#include "sluice/parallel/collectives.h"
#include "sluice/train/flops.h"
#include "sluice/train/run_folder.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

StreamOptions stream_options(const SftOptions& options) {
  return {.seq_len = options.data.seq_len,
          .tokens_per_step = options.train.tokens_per_step,
          .seed = static_cast<std::uint64_t>(options.seed),
          .packing = options.data.packing};
}

std::vector<PackedBatch> all_packs(const std::vector<Sample>& samples, std::int64_t seq_len) {
  std::vector<std::int64_t> order, lengths;
  for (const auto& sample : samples) {
    order.push_back(static_cast<std::int64_t>(order.size()));
    lengths.push_back(static_cast<std::int64_t>(sample.tokens.size()));
  }
  std::vector<PackedBatch> packs;
  for (const auto& places : best_fit_packs(order, lengths, seq_len)) packs.push_back(pack(samples, places));
  return packs;
}

std::int64_t count_steps(const TrainOptions& train, const BatchStream& batches) {
  if (train.steps) return *train.steps;
  std::int64_t total = 0;
  for (std::int64_t epoch = 0; epoch < train.epochs; ++epoch) total += batches.steps_in_epoch(epoch);
  return total;
}

Objective objective_of(const SftOptions& options, const Model& model, const std::optional<TrainedAdapters>& adapters) {
  const bool mtp_only = options.train.mtp == MtpTraining::kOnly;
  return {.decoder = *model.decoder,
          .router_aux_loss_coef = options.train.router_aux_loss_coef.value_or(model.router_aux_loss_coef),
          .mtp = model.mtp.get(),
          .mtp_loss_scale = options.train.mtp_loss_scale,
          .mtp_only = mtp_only,
          .adapters = adapters ? adapters->dropout.get() : nullptr};
}

}  // namespace

SftTrainer::SftTrainer(const SftOptions& options, Model& model, const std::vector<Sample>& train,
                       const std::vector<Sample>& eval, const std::optional<TrainingState>& state,
                       std::optional<double> peak, const std::optional<TrainedAdapters>& adapters)
    : options_(options),
      mesh_(model.decoder->mesh()),
      adapters_(adapters ? describe_adapters(model, adapters->settings) : nlohmann::json()),
      objective_(objective_of(options, model, adapters)),
      samples_(fingerprint(train)),
      eval_(all_packs(eval, options.data.seq_len)),
      batches_(train, stream_options(options)),
      parameters_(prepare(trained_parameters(model, options.train.mtp), options.optim)),
      gradients_(parameters_, mesh_, gradients_kept(options.parallel)),
      optimizer_(parameters_, adamw_settings(options.optim), mesh_,
                 offload_settings(options.mem.offload, options.run.out)),
      schedule_(make_schedule(options.optim, count_steps(options.train, batches_))),
      first_step_(state ? state->step + 1 : 1),
      peak_(peak),
      checkpoints_(options.run.out, {.keep_last = options.ckpt.keep_last, .keep_every = options.ckpt.keep_every},
                   mesh_) {
  if (mesh_.world().rank() == 0) metrics_.emplace(options.run.out / "metrics.jsonl", first_step_ - 1);
  model.decoder->set_recompute(options.mem.recompute ? Recompute::kBlocks : Recompute::kNone);
  prepare_recording();
  if (state) {
    optimizer_.restore(state->tensors, state->step);
    batches_.restore(state->meta.at("data").get<DataPosition>());
    trained_tokens_ = state->meta.at("trained_tokens").get<std::int64_t>();
  }
}

void SftTrainer::prepare_recording() {
  const auto device = objective_.decoder.device();
  const auto seq_len = options_.data.seq_len;
  if (!device.is_cuda() || !launches_bind(objective_, seq_len)) return;
  if (const auto reason = why_not_recorded(objective_); !reason.empty()) {
    log_info("launches bind packs of {} tokens, and they are not recorded: {}", seq_len, reason);
    return;
  }
  recorded_.emplace(objective_, gradients_, [device](const std::function<void()>& work, RecordedWork* beside) {
    return record_work(device, work, beside);
  });
}

ExitCode SftTrainer::run() {
  const StopSignals stop;
  begin_ = Clock::now();
  for (auto step = first_step_; step <= schedule_.total_steps; ++step) {
    const auto begin = Clock::now();
    const auto lr = learning_rate(schedule_, step);
    const auto packs = batches_.next();
    const auto stats = train_step(objective_, packs, gradients_, optimizer_, step, lr, options_.optim.clip_norm,
                                  recorded_ ? &*recorded_ : nullptr);
    finish_step(step, lr, stats, training_operations(objective_, packs), seconds_since(begin));
    const bool stopping = step < schedule_.total_steps && stop_wanted(stop);
    if (stopping || due(step, options_.ckpt.interval, schedule_.total_steps)) {
      save(step, /*last=*/stopping || step == schedule_.total_steps);
    }
    if (stopping) {
      log_warning("stopped on request after step {}; --ckpt.resume auto goes on", step);
      return ExitCode::kRequeue;
    }
  }
  return ExitCode::kDone;
}

// A signal may reach some of the processes only, or between two steps of theirs.
bool SftTrainer::stop_wanted(const StopSignals& signals) const {
  const auto asked = all_gather_numbers({signals.requested() ? 1 : 0}, mesh_.world());
  return std::ranges::any_of(asked, [](const auto& its) { return its[0] != 0; });
}

void SftTrainer::finish_step(std::int64_t step, double lr, const StepStats& stats, double operations, double step_s) {
  trained_tokens_ += stats.trained_tokens;
  const auto tokens_per_s = static_cast<double>(stats.tokens) / step_s;
  const auto memory = peak_memory_bytes(objective_.decoder.device());
  const auto mean_step_s = seconds_since(begin_) / static_cast<double>(step - first_step_ + 1);
  nlohmann::ordered_json values{{"train/loss", stats.loss},
                                {"train/grad_norm", stats.grad_norm},
                                {"train/lr", lr},
                                {"train/accuracy", stats.accuracy},
                                {"train/tokens", stats.tokens},
                                {"train/trained_tokens", trained_tokens_},
                                {"data/epoch", batches_.position().epoch},
                                {"perf/tokens_per_s", tokens_per_s},
                                {"perf/step_s", step_s},
                                {"perf/tflops", operations / step_s / 1e12},
                                {"mem/peak_gib", static_cast<double>(memory) / (1 << 30)}};
  const auto ranks = static_cast<double>(mesh_.world().size());
  const auto mfu = peak_ ? std::optional(operations / step_s / (*peak_ * ranks)) : std::nullopt;
  if (mfu) values["perf/mfu"] = *mfu;
  if (objective_.router_aux_loss_coef > 0) values["train/router_aux_loss"] = stats.router_aux_loss;
  if (objective_.mtp != nullptr) values["train/mtp_loss"] = stats.mtp_loss;
  progress_.step({.step = step,
                  .steps = schedule_.total_steps,
                  .loss = stats.loss,
                  .grad_norm = stats.grad_norm,
                  .lr = lr,
                  .tokens_per_s = tokens_per_s,
                  .mfu = mfu,
                  .memory_bytes = static_cast<double>(memory),
                  .step_s = step_s,
                  .eta_s = mean_step_s * static_cast<double>(schedule_.total_steps - step)});
  if (!eval_.empty() && due(step, options_.eval.interval, schedule_.total_steps)) {
    const auto found = evaluate(objective_, eval_);
    values["eval/loss"] = found.loss;
    values["eval/perplexity"] = std::exp(found.loss);
    values["eval/accuracy"] = found.accuracy;
    if (objective_.mtp != nullptr) values["eval/mtp_loss"] = found.mtp_loss;
    log_info("step {}: eval loss {:.4f}, perplexity {:.3f}, accuracy {:.1f}% of {} tokens", step, found.loss,
             std::exp(found.loss), 100 * found.accuracy, found.trained_tokens);
  }
  if (metrics_) metrics_->write(step, values);
}

void SftTrainer::save(std::int64_t step, bool last) {
  const TrainingState state{.step = step,
                            .meta = {{"settings", maths_settings(options_)},
                                     {"samples", samples_},
                                     {"adapters", adapters_},
                                     {"data", batches_.position()},
                                     {"trained_tokens", trained_tokens_}},
                            .tensors = optimizer_.state()};
  if (last || options_.mem.offload == Offload::kDisk) {
    checkpoints_.save_now(state);  // nothing trains meanwhile: no copy is made, which memory might not hold
  } else {
    checkpoints_.save(state);
  }
}

}  // namespace sluice
