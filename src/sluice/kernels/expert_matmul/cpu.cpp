// SPDX-License-Identifier: Apache-2.0
// CPU path: the experts one after another, each one large product on all threads, so that no thread waits for the
// expert that most tokens chose. Lines are gathered for one expert at a time.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "sluice/core/error.h"
#include "sluice/kernels/common/matmul.h"
#include "sluice/kernels/common/multiarch.h"
#include "sluice/kernels/common/packing.h"
#include "sluice/kernels/common/rows.h"
#include "sluice/kernels/expert_matmul/expert_matmul.h"

namespace sluice {
namespace {

using Optional = const std::optional<Tensor>&;

// The rows that the lines read from, or add to, one of the operands.
struct Lines {
  Tensor rows;  // [M] dense, or undefined: line i is row i

  Lines(const char* name, Optional given, std::int64_t lines, std::int64_t size) {
    if (!given) {
      SLUICE_CHECK(lines == size,
                   "expert_matmul: without {} there must be a row for each of the {} lines; there are {}", name, lines,
                   size);
      return;
    }
    rows = given->contiguous();
    SLUICE_CHECK(rows.size(0) == lines, "expert_matmul: {} has {} entries; there are {} lines", name, rows.size(0),
                 lines);
    for (std::int64_t i = 0; i < lines; ++i) {
      SLUICE_CHECK(data()[i] >= 0 && data()[i] < size, "expert_matmul: {} at line {} is {}, of {} rows", name, i,
                   data()[i], size);
    }
  }
  const std::int64_t* data() const { return rows.const_data_ptr<std::int64_t>(); }

  // Those of lines [first, first + count), in order.
  Tensor gather(const Tensor& x, std::int64_t first, std::int64_t count) const {
    return rows.defined() ? x.index_select(0, rows.narrow(0, first, count)) : x.narrow(0, first, count);
  }
};

std::vector<std::int64_t> checked_offsets(const Tensor& offsets) {
  auto bounds = sequence_bounds(offsets);
  SLUICE_CHECK(bounds[0] == 0, "expert_matmul: offsets must begin with 0, not {}", bounds[0]);
  for (std::size_t e = 0; e + 1 < bounds.size(); ++e) {
    SLUICE_CHECK(bounds[e] <= bounds[e + 1], "expert_matmul: offsets fall from {} to {} at expert {}", bounds[e],
                 bounds[e + 1], e);
  }
  return bounds;
}

std::int64_t most_lines(const std::vector<std::int64_t>& bounds) {
  std::int64_t most = 0;
  for (std::size_t e = 0; e + 1 < bounds.size(); ++e) most = std::max(most, bounds[e + 1] - bounds[e]);
  return most;
}

// c = a b, rounded to c's dtype. `wide` has room for it in the accumulation type.
void product_into(const Tensor& c, const Tensor& a, const Tensor& b, const Tensor& wide) {
  if (c.scalar_type() != kBFloat16) return matmul_into(c, a, b, /*accumulate=*/false);
  const auto room = wide.narrow(0, 0, c.size(0));
  matmul_into(room, a, b, /*accumulate=*/false);
  c.copy_(room);
}

template <typename Real>
SLUICE_MULTIARCH void add_columns(const Real* from, const std::int64_t* rows, std::int64_t count, std::int64_t width,
                                  std::int64_t first, std::int64_t last, Real* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    const Real* __restrict source = from + i * width;
    Real* __restrict sum = to + rows[i] * width;
    for (auto c = first; c < last; ++c) sum[c] += source[c];
  }
}

// sum[rows[i]] += product[i]. Threads share the columns: rows may repeat.
void add_rows(const Tensor& product, const std::int64_t* rows, const Tensor& sum) {
  const auto count = product.size(0), width = product.size(1);
  AT_DISPATCH_FLOATING_TYPES(product.scalar_type(), "expert_matmul", [&] {
    const auto* from = product.const_data_ptr<scalar_t>();
    auto* to = sum.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, width, rows_per_task(count), [&](std::int64_t first, std::int64_t last) {
      add_columns(from, rows, count, width, first, last, to);
    });
  });
}

Tensor forward_cpu(const Tensor& x, const Tensor& weight, const Tensor& offsets, Optional x_rows, Optional out_rows,
                   std::int64_t out_size) {
  const auto bounds = checked_offsets(offsets);
  const Lines from("x_rows", x_rows, bounds.back(), x.size(0)), to("out_rows", out_rows, bounds.back(), out_size);
  const auto dense = x.contiguous();
  const auto matrices = weight.stride(1) == 1 || weight.stride(2) == 1 ? weight : weight.contiguous();
  const auto width = weight.size(1);
  const auto wide = x.options().dtype(wide_type(x.scalar_type()));
  const auto product = at::empty({most_lines(bounds), width}, wide);
  const auto out = to.rows.defined() ? at::zeros({out_size, width}, wide) : at::empty({out_size, width}, x.options());
  for (std::int64_t e = 0; e < weight.size(0); ++e) {
    const auto first = bounds[e], count = bounds[e + 1] - first;
    if (count == 0) continue;
    const auto read = from.gather(dense, first, count), matrix = matrices[e].t();
    if (to.rows.defined()) {
      const auto own = product.narrow(0, 0, count);
      matmul_into(own, read, matrix, /*accumulate=*/false);
      add_rows(own, to.data() + first, out);
    } else {
      product_into(out.narrow(0, first, count), read, matrix, product);
    }
  }
  return out.to(x.scalar_type());
}

Tensor backward_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& offsets, Optional out_rows,
                    Optional x_rows) {
  const auto bounds = checked_offsets(offsets);
  const Lines of_grad("out_rows", out_rows, bounds.back(), grad_out.size(0)),
      of_x("x_rows", x_rows, bounds.back(), x.size(0));
  const auto grad = grad_out.contiguous(), dense = x.contiguous();
  const auto experts = offsets.size(0) - 1, out = grad.size(1), in = x.size(1);
  const auto grad_weight = at::empty({experts, out, in}, x.options());
  const auto wide = at::empty({out, in}, x.options().dtype(wide_type(x.scalar_type())));
  for (std::int64_t e = 0; e < experts; ++e) {
    const auto first = bounds[e], count = bounds[e + 1] - first;
    if (count == 0) {
      grad_weight[e].zero_();
    } else {
      product_into(grad_weight[e], of_grad.gather(grad, first, count).t(), of_x.gather(dense, first, count), wide);
    }
  }
  return grad_weight;
}

}  // namespace

TORCH_LIBRARY_IMPL(sluice, CPU, m) {
  m.impl("expert_matmul", forward_cpu);
  m.impl("expert_matmul_backward", backward_cpu);
}

}  // namespace sluice
