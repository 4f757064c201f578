// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/tensor_parallel.h"

#include <torch/custom_class.h>

#include <numeric>

#include "sluice/kernels/common/matmul.h"
#include "sluice/parallel/collectives.h"

namespace sluice {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Of each rank, on average, from which on a product for its rows alone keeps a GPU busy. Below, launches would take
// longer than the exchange.
constexpr std::int64_t kFewestRows = 4096;

bool goes_beside(const ForwardContext& context) {
  const auto& rows = context.split.rows;
  const auto ranks = context.mesh.tp().size();
  return ranks > 1 && std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) >= ranks * kFewestRows;
}

struct Ranks : torch::CustomClassHolder {
  explicit Ranks(const ForwardContext& context) : group(context.mesh.tp()), rows(context.split.rows) {}
  Group group;
  std::vector<std::int64_t> rows;
};

void keep(AutogradContext* context, const c10::intrusive_ptr<Ranks>& ranks) {
  context->saved_data["ranks"] = c10::IValue::make_capsule(ranks);
}
c10::intrusive_ptr<Ranks> kept_ranks(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Ranks>(context->saved_data["ranks"].toCapsule());
}

class Column : public torch::autograd::Function<Column> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& own, at::TensorList weights,
                               const c10::intrusive_ptr<Ranks>& ranks) {
    const auto tokens = std::accumulate(ranks->rows.begin(), ranks->rows.end(), std::int64_t{0});
    variable_list outputs{Tensor()};
    for (const auto& weight : weights) outputs.push_back(at::empty({tokens, weight.size(0)}, own.options()));
    outputs[0] = all_gather_rows_while(own, ranks->rows, ranks->group, [&](std::int64_t begin, const Tensor& rows) {
      for (std::size_t i = 0; i < weights.size(); ++i) {
        auto y = outputs[i + 1].narrow(0, begin, rows.size(0));
        at::mm_out(y, rows, weights[i].t());
      }
    });
    variable_list saved{outputs[0]};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(saved);
    context->set_materialize_grads(false);
    keep(context, ranks);
    return outputs;
  }

  // The gradient of x goes out beside the products for those of the weights.
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto ranks = kept_ranks(context);
    const auto& x = saved[0];
    variable_list result(saved.size() + 1);  // of own, the weights, and none for the ranks
    const auto of_weights = [&] {
      for (std::size_t i = 1; i < grads.size(); ++i) {
        if (grads[i].defined() && context->needs_input_grad(i)) result[i] = at::mm(grads[i].t(), x);
      }
    };
    if (!context->needs_input_grad(0)) {
      of_weights();
      return result;
    }
    const auto of_x = [&](std::int64_t begin, std::int64_t count) {
      auto sum = grads[0].defined() ? grads[0].narrow(0, begin, count).clone() : Tensor();
      for (std::size_t i = 1; i < grads.size(); ++i) {
        if (!grads[i].defined()) continue;
        const auto its = grads[i].narrow(0, begin, count);
        sum = sum.defined() ? sum.addmm_(its, saved[i]) : at::mm(its, saved[i]);
      }
      return sum;
    };
    result[0] = reduce_scatter_rows_while(ranks->rows, ranks->group, of_x, of_weights);
    return result;
  }
};

class Row : public torch::autograd::Function<Row> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const c10::intrusive_ptr<Ranks>& ranks) {
    context->save_for_backward({x, weight});
    keep(context, ranks);
    return reduce_scatter_rows_while(ranks->rows, ranks->group, [&](std::int64_t begin, std::int64_t count) {
      return at::mm(x.narrow(0, begin, count), weight.t());
    });
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto ranks = kept_ranks(context);
    const auto &x = saved[0], &weight = saved[1];
    const bool x_too = context->needs_input_grad(0);
    auto grad_x = x_too ? at::empty_like(x) : Tensor();
    const auto all =
        all_gather_rows_while(grads[0], ranks->rows, ranks->group, [&](std::int64_t begin, const Tensor& rows) {
          if (!x_too) return;
          auto its = grad_x.narrow(0, begin, rows.size(0));
          at::mm_out(its, rows, weight);
        });
    return {grad_x, context->needs_input_grad(1) ? at::mm(all.t(), x) : Tensor(), Tensor()};
  }
};

}  // namespace

GatheredProducts gathered_products(const Tensor& own, const std::vector<Tensor>& weights,
                                   const ForwardContext& context) {
  if (goes_beside(context)) {
    auto outputs = Column::apply(own, at::TensorList(weights), c10::make_intrusive<Ranks>(context));
    return {.x = outputs[0], .y = {outputs.begin() + 1, outputs.end()}};
  }
  GatheredProducts result{.x = gather_tokens(own, context), .y = {}};
  for (const auto& weight : weights) result.y.push_back(times_weight(result.x, weight));
  return result;
}

GatheredProducts column_parallel(const Tensor& own, const std::vector<const Linear*>& projections,
                                 const ForwardContext& context) {
  std::vector<Tensor> weights;
  for (const auto* projection : projections) weights.push_back(projection->weight());
  auto result = gathered_products(own, weights, context);
  for (std::size_t i = 0; i < projections.size(); ++i) result.y[i] = projections[i]->adapted(result.y[i], result.x);
  return result;
}

Tensor row_parallel(const Tensor& x, const Linear& projection, const ForwardContext& context) {
  if (goes_beside(context) && !projection.is_adapted()) {
    return Row::apply(x, projection.weight(), c10::make_intrusive<Ranks>(context));
  }
  return scatter_tokens(projection.forward(x), context);
}

}  // namespace sluice
