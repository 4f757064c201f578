// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/gradient_sum.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cassert>
#include <functional>

#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

// Exchanges that go on at once: one fills the link while the next one's gradients are gathered. Each holds a bucket.
constexpr std::size_t kExchanges = 2;

class OnGradient : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit OnGradient(std::function<void()> f) : function_(std::move(f)) {}
  void operator()(const Tensor&) override { function_(); }

 private:
  std::function<void()> function_;
};

// Blocks of fixed size summed in order: the same bits whatever the number of threads.
double sum_of_squares(const Tensor& x) {
  constexpr std::int64_t kBlock = 1 << 16;
  const auto blocks = (x.numel() + kBlock - 1) / kBlock;
  std::vector<double> partial(static_cast<std::size_t>(blocks));
  const auto* data = x.const_data_ptr<float>();
  at::parallel_for(0, blocks, 1, [&](std::int64_t first, std::int64_t last) {
    for (auto block = first; block < last; ++block) {
      double sum = 0;
      const auto end = std::min(x.numel(), (block + 1) * kBlock);
      for (auto i = block * kBlock; i < end; ++i) sum += static_cast<double>(data[i]) * data[i];
      partial[static_cast<std::size_t>(block)] = sum;
    }
  });
  double total = 0;
  for (const auto sum : partial) total += sum;
  return total;
}

// While it lives, calls `take` of each parameter whose gradient is complete.
class GradientsTaken {
 public:
  GradientsTaken(const Shards& shards, const std::function<void(std::size_t)>& take) : shards_(shards) {
    for (std::size_t i = 0; i < shards.size(); ++i) set(i, std::make_unique<OnGradient>([take, i] { take(i); }));
  }
  ~GradientsTaken() {
    for (std::size_t i = 0; i < shards_.size(); ++i) set(i, nullptr);
  }
  GradientsTaken(const GradientsTaken&) = delete;
  GradientsTaken& operator=(const GradientsTaken&) = delete;

 private:
  void set(std::size_t i, std::unique_ptr<torch::autograd::PostAccumulateGradHook> hook) {
    torch::autograd::impl::set_post_acc_grad_hooks(shards_.parameter(i).value, std::move(hook));
  }
  const Shards& shards_;
};

void add_to(Tensor& sum, const Tensor& more) {
  if (sum.defined()) sum.add_(more);
  else sum = more.to(kFloat).contiguous();
}

}  // namespace

GradientSum::GradientSum(const std::vector<Parameter*>& parameters, const Mesh& mesh, Kept kept,
                         std::int64_t bucket_elements)
    : shards_(parameters, mesh, bucket_elements), kept_(kept), pieces_(parameters.size()), sums_(parameters.size()) {}

void GradientSum::add(const Tensor& loss, bool last) {
  exchanges_ = last || kept_ == Kept::kOwned;
  next_bucket_ = 0;
  awaited_.clear();
  for (const auto& bucket : shards_.buckets()) awaited_.push_back(bucket.size());
  {
    const GradientsTaken taken(shards_, [this](std::size_t i) { take(i); });
    loss.backward();
  }
  if (!exchanges_) return;
  while (next_bucket_ < awaited_.size()) start_next_bucket();  // of parameters without gradient
  while (!started_.empty()) finish_first_bucket();
}

void GradientSum::take(std::size_t index) {
  auto& gradient = shards_.parameter(index).value.mutable_grad();
  const auto bucket = shards_.bucket_of(index);
  add_to(bucket ? pieces_[index] : sums_[index], gradient);
  gradient.reset();
  if (!bucket) return;
  --awaited_[*bucket];
  while (exchanges_ && next_bucket_ < awaited_.size() && awaited_[next_bucket_] == 0) start_next_bucket();
}

void GradientSum::start_next_bucket() {
  if (started_.size() == kExchanges) finish_first_bucket();
  started_.emplace_back(next_bucket_, shards_.start_sum(shards_.buckets()[next_bucket_], pieces_));
  ++next_bucket_;
}

void GradientSum::finish_first_bucket() {
  const auto [bucket, wait] = std::move(started_.front());
  started_.pop_front();
  const auto rows = wait();
  for (std::size_t i = 0; i < rows.size(); ++i) add_to(sums_[shards_.buckets()[bucket][i]], rows[i]);
}

Tensor GradientSum::norm() const {
  const auto device = sums_.empty() ? at::Device(at::kCPU) : shards_.parameter(0).value.device();
  std::vector<Tensor> defined;
  for (const auto& sum : sums_) {
    if (sum.defined() && sum.numel() > 0) defined.push_back(sum);
  }
  auto squares = at::zeros({}, at::TensorOptions().dtype(kDouble).device(device));
  if (!device.is_cpu() && !defined.empty()) {
    squares = at::stack(at::_foreach_norm(defined, 2, kDouble)).square().sum();
  } else {
    for (const auto& sum : defined) squares += sum_of_squares(sum);
  }
  return all_reduce_sum(squares, mesh().world()).sqrt();
}

std::string GradientSum::first_not_finite() const {
  auto first = std::ssize(sums_);
  for (std::int64_t i = first - 1; i >= 0; --i) {
    const auto& sum = sums_[static_cast<std::size_t>(i)];
    if (sum.defined() && !sum.isfinite().all().item<bool>()) first = i;
  }
  for (const auto& its : all_gather_numbers({first}, mesh().world())) first = std::min(first, its[0]);
  return first < std::ssize(sums_) ? shards_.parameter(static_cast<std::size_t>(first)).name : "";
}

void GradientSum::clear() {
  if (stay_) {
    if (!sums_.empty()) at::_foreach_zero_(sums_);
    return;
  }
  for (auto& sum : sums_) sum.reset();
}

void GradientSum::keep_places() {
  assert(mesh().world().size() == 1);
  stay_ = true;
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    if (!sums_[i].defined()) sums_[i] = at::zeros_like(shards_.parameter(i).value.detach(), kFloat);
  }
}

}  // namespace sluice
