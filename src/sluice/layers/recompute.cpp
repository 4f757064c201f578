// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/recompute.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/custom_class.h>

namespace sluice {
namespace {

struct Call : torch::CustomClassHolder {
  explicit Call(std::function<Tensor(const Tensor&)> f) : function(std::move(f)) {}
  std::function<Tensor(const Tensor&)> function;
};

class Recompute : public torch::autograd::Function<Recompute> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<Call>& call,
                        at::TensorList inputs) {
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
    const auto output = call->function(inputs[0]);
    torch::autograd::variable_list wanted;
    for (const auto& input : inputs) {
      if (input.requires_grad()) wanted.push_back(input);
    }
    auto found = torch::autograd::grad({output}, wanted, grads, /*retain_graph=*/false, /*create_graph=*/false,
                                       /*allow_unused=*/true);
    torch::autograd::variable_list result{Tensor()};  // for `call`
    auto next = found.begin();
    for (const auto& input : inputs) result.push_back(input.requires_grad() ? *next++ : Tensor());
    return result;
  }
};

}  // namespace

Tensor recompute(const std::function<Tensor(const Tensor&)>& function, const Tensor& x,
                 const std::vector<Tensor>& parameters) {
  torch::autograd::variable_list inputs{x};
  inputs.insert(inputs.end(), parameters.begin(), parameters.end());
  return Recompute::apply(c10::make_intrusive<Call>(function),
                          at::TensorList(inputs));  // a vector would get no gradient
}

}  // namespace sluice
