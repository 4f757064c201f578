// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/bench.h"

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

#include "sluice/core/error.h"
#include "sluice/kernels/gated_delta_rule/gated_delta_rule.h"
#include "sluice/layers/gated_delta_net.h"

namespace sluice {
namespace {

using Work = std::function<void()>;
constexpr int kRuns = 9;

// Milliseconds on the clock of the device itself, where it has one.
double time_once(at::Device device, const Work& work) {
  if (device.is_cpu()) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  c10::Event begin(device.type(), c10::EventFlag::BACKEND_DEFAULT), end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  begin.record(stream);
  work();
  end.record(stream);
  end.synchronize();
  return begin.elapsedTime(end);
}

// The median of several runs, after two to warm up.
double median_ms(at::Device device, const Work& work) {
  for (int i = 0; i < 2; ++i) time_once(device, work);
  std::vector<double> times(kRuns);
  for (auto& time : times) time = time_once(device, work);
  std::ranges::nth_element(times, times.begin() + kRuns / 2);
  return times[kRuns / 2];
}

// What this machine reaches, measured: operations and bytes a millisecond.
struct Ceilings {
  double operations, bytes;
};

Ceilings measure_ceilings(const at::TensorOptions& type) {
  const auto device = type.device();
  const std::int64_t side = device.is_cpu() ? 1024 : 8192, elements = std::int64_t{1} << (device.is_cpu() ? 25 : 31);
  const auto a = at::randn({side, side}, type), b = at::randn({side, side}, type);
  const auto product = median_ms(device, [&] { at::mm(a, b); });
  const auto from = at::zeros(elements, type), to = at::zeros(elements, type);
  const auto copy = median_ms(device, [&] { to.copy_(from); });
  return {2.0 * static_cast<double>(side * side * side) / product, 2.0 * static_cast<double>(from.nbytes()) / copy};
}

// Operations and bytes that no way around is known for, of a forward pass and of both passes.
struct Needs {
  double operations = 0, bytes = 0;
  Needs operator+(const Needs& other) const { return {operations + other.operations, bytes + other.bytes}; }
  double floor_ms(const Ceilings& ceilings) const { return operations / ceilings.operations + bytes / ceilings.bytes; }
};

struct Sizes {
  double tokens, hidden, key_heads, value_heads, dim, element;  // element: bytes of an activation
  double channels() const { return (2 * key_heads + value_heads) * dim; }
  double values() const { return value_heads * dim; }
};

// The recurrence in chunks of 64 tokens. Its inputs are read and its outputs written once a pass.
Needs recurrence_needs(const Sizes& s, bool backward) {
  const double pair = 2 * 64 * s.dim, state = 2 * s.dim * s.dim, row = s.element * s.dim, gates = 8 * s.value_heads;
  const Needs forward{s.tokens * (2 * s.key_heads * pair + s.value_heads * (2 * pair + 3 * state)),
                      s.tokens * (row * (2 * s.key_heads + 2 * s.value_heads) + gates)};
  if (!backward) return forward;
  const Needs again{forward.operations - s.tokens * s.value_heads * (pair + state), 0};
  const Needs gradients{s.tokens * (4 * s.key_heads * pair + s.value_heads * (4 * pair + 6 * state)),
                        s.tokens * (row * (4 * s.key_heads + 3 * s.value_heads) + 2 * gates)};
  return forward + again + gradients;
}

// With the projections' products and, between them, each activation that one pass must read or write, once: x and y of
// the convolution, then dy, x, dx; x, z, y of the norm, then dy, x, z, dx, dz.
Needs layer_needs(const Sizes& s, bool backward) {
  const double projections = 2 * s.tokens * s.hidden * (s.channels() + 2 * s.values() + 2 * s.value_heads);
  const double elements = backward ? 5 * s.channels() + 8 * s.values() : 2 * s.channels() + 3 * s.values();
  return Needs{(backward ? 3 : 1) * projections, s.element * s.tokens * elements} + recurrence_needs(s, backward);
}

struct Times {
  double forward, both;
};

// `forward` gives an output; `leaves` take the gradients.
Times measure(at::Device device, const std::vector<Tensor>& leaves, const std::function<Tensor()>& forward) {
  Times times{};
  {
    const at::NoGradGuard no_grad;
    times.forward = median_ms(device, [&] { forward(); });
  }
  const auto gradient = at::ones_like(forward());
  times.both = median_ms(device, [&] {
    for (const auto& leaf : leaves) leaf.mutable_grad().reset();
    forward().backward(gradient);
  });
  return times;
}

Times measure_layer(const GatedDeltaNet& layer, const Pack& pack, const Tensor& x) {
  std::vector<Tensor> leaves{x};
  for (const auto* parameter : layer.parameters()) leaves.push_back(parameter->value);
  return measure(x.device(), leaves, [&] { return layer.forward(x, {.pack = pack, .rotary = {}}, nullptr); });
}

// Gates as a trained model has them.
Times measure_recurrence(const BenchOptions& options, const Pack& pack, std::int64_t tokens,
                         const at::TensorOptions& type) {
  const auto leaf = [](const Tensor& value) { return value.detach().requires_grad_(); };
  const auto heads = [&](std::int64_t count) { return leaf(at::randn({tokens, count, options.head_dim}, type)); };
  const auto q = heads(options.key_heads), k = heads(options.key_heads), v = heads(options.value_heads);
  const auto wide = type.dtype(kFloat);
  const auto rate = at::empty({options.value_heads}, wide).uniform_(0.01, 16);
  const auto g = leaf(-rate * at::softplus(at::randn({tokens, options.value_heads}, wide) - 3));
  const auto beta = leaf(at::rand({tokens, options.value_heads}, wide));
  const auto scale = 1 / std::sqrt(static_cast<double>(options.head_dim));
  return measure(type.device(), {q, k, v, g, beta}, [&] {
    return gated_delta_rule(q, k, v, g, beta, pack.cu_seqlens, std::nullopt, scale, /*qk_l2norm=*/true,
                            /*output_final_state=*/false)
        .out;
  });
}

void print_times(const Times& times, const Needs& forward, const Needs& both, const Ceilings& ceilings) {
  const auto share = [&](const Needs& needs, double time) { return 100 * needs.floor_ms(ceilings) / time; };
  fmt::print(" {:>9.3f} {:>4.0f}% {:>9.3f} {:>4.0f}%", times.forward, share(forward, times.forward), times.both,
             share(both, times.both));
}

}  // namespace

ExitCode run_bench(const BenchOptions& options, const Invocation&) {
  if (options.value_heads % options.key_heads != 0) {
    fail_usage("value_heads: expected a multiple of key_heads, {}; got {}", options.key_heads, options.value_heads);
  }
  for (const auto tokens : options.tokens) {
    if (tokens % options.sequences != 0) {
      fail_usage("tokens: expected a multiple of sequences, {}; got {}", options.sequences, tokens);
    }
  }
  const auto dtype = options.dtype == Precision::kFloat32 ? kFloat : kBFloat16;
  GatedDeltaNet layer({.hidden_size = options.hidden_size,
                       .num_key_heads = options.key_heads,
                       .num_value_heads = options.value_heads,
                       .key_head_dim = options.head_dim,
                       .value_head_dim = options.head_dim,
                       .conv_kernel_dim = 4,
                       .rms_norm_eps = 1e-6,
                       .initializer_range = 0.02});
  const auto [device, device_name] = open_device(options.device);
  if (const auto reason = layer.why_not_on_gpu(dtype); device.is_cuda() && !reason.empty()) {
    fail_usage("device cuda: {}.\n  Take --device cpu.", reason);
  }
  initialize(layer.parameters(), dtype, 1);
  for (auto* parameter : layer.parameters()) parameter->value = parameter->value.to(device).requires_grad_();
  const auto type = at::TensorOptions(device).dtype(dtype);
  const auto ceilings = measure_ceilings(type);

  fmt::print("gated_delta_net on {}: hidden {}, {} key heads, {} value heads, head dim {}\n",
             device.is_cpu() ? "the CPU" : device_name, options.hidden_size, options.key_heads, options.value_heads,
             options.head_dim);
  fmt::print("ceilings: products {:.1f} TFLOP/s, copies {:.3f} TB/s; milliseconds, and the floor's share of them\n",
             ceilings.operations / 1e9, ceilings.bytes / 1e9);
  fmt::print("{:>8} | {:^31} | {:^31} | {:>8}\n", "", "layer", "recurrence alone", "peak so");
  fmt::print("{:>8} | {:>9} {:>5} {:>9} {:>5} | {:>9} {:>5} {:>9} {:>5} | {:>8}\n", "tokens", "forward", "", "both", "",
             "forward", "", "both", "", "far, GiB");
  for (const auto tokens : options.tokens) {
    const auto pack = make_pack(std::vector(options.sequences, tokens / options.sequences), {}, {}, device);
    const Sizes sizes{static_cast<double>(tokens),
                      static_cast<double>(options.hidden_size),
                      static_cast<double>(options.key_heads),
                      static_cast<double>(options.value_heads),
                      static_cast<double>(options.head_dim),
                      static_cast<double>(type.dtype().itemsize())};
    fmt::print("{:>8} |", tokens);
    const auto x = at::randn({tokens, options.hidden_size}, type).requires_grad_();
    print_times(measure_layer(layer, pack, x), layer_needs(sizes, false), layer_needs(sizes, true), ceilings);
    fmt::print(" |");
    print_times(measure_recurrence(options, pack, tokens, type), recurrence_needs(sizes, false),
                recurrence_needs(sizes, true), ceilings);
    fmt::print(" | {:>8.2f}\n", static_cast<double>(peak_memory_bytes(device)) / (1 << 30));
    std::fflush(stdout);
  }
  return ExitCode::kDone;
}

}  // namespace sluice
