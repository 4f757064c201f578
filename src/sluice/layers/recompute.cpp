// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/recompute.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/custom_class.h>

namespace sluice {
namespace {

struct Call : torch::CustomClassHolder {
  explicit Call(Recomputed f) : function(std::move(f)) {}
  Recomputed function;
};

class Recompute : public torch::autograd::Function<Recompute> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const c10::intrusive_ptr<Call>& call, at::TensorList inputs) {
    context->save_for_backward(inputs.vec());
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    const at::NoGradGuard no_grad;
    return call->function(inputs[0]);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto inputs = context->get_saved_variables();
    const auto call = c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
    const at::AutoGradMode with_grad(true);
    inputs[0] = inputs[0].detach().requires_grad_(true);
    torch::autograd::variable_list outputs, output_grads, wanted;
    const auto all_outputs = call->function(inputs[0]);
    for (std::size_t i = 0; i < all_outputs.size(); ++i) {
      if (!all_outputs[i].requires_grad()) continue;
      outputs.push_back(all_outputs[i]);
      output_grads.push_back(grads[i]);
    }
    for (const auto& input : inputs) {
      if (input.requires_grad()) wanted.push_back(input);
    }
    auto found = torch::autograd::grad(outputs, wanted, output_grads, /*retain_graph=*/false, /*create_graph=*/false,
                                       /*allow_unused=*/true);
    torch::autograd::variable_list result{Tensor()};  // for `call`
    auto next = found.begin();
    for (const auto& input : inputs) result.push_back(input.requires_grad() ? *next++ : Tensor());
    return result;
  }
};

}  // namespace

std::vector<Tensor> recompute(const Recomputed& function, const Tensor& x, const std::vector<Tensor>& parameters) {
  torch::autograd::variable_list inputs{x};
  inputs.insert(inputs.end(), parameters.begin(), parameters.end());
  return Recompute::apply(c10::make_intrusive<Call>(function),
                          at::TensorList(inputs));  // a vector would get no gradient
}

}  // namespace sluice
