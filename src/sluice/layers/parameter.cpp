// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/parameter.h"

#include <ATen/CPUGeneratorImpl.h>
#include <xxhash.h>

#include <numeric>

namespace sluice {

std::int64_t Parameter::size() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::int64_t count_elements(const std::vector<Parameter*>& parameters) {
  std::int64_t count = 0;
  for (const auto* parameter : parameters) count += parameter->size();
  return count;
}

Parameter& Module::declare(Parameter parameter) {
  own_.push_back(std::make_unique<Parameter>(std::move(parameter)));
  auto* declared = own_.back().get();
  order_.emplace_back([declared](auto& list) { list.push_back(declared); });
  return *declared;
}

void Module::adopt(const std::string& name, std::unique_ptr<Module> child) {
  child->prepend(name + ".");
  children_.push_back(std::move(child));
  order_.emplace_back([adopted = children_.back().get()](auto& list) {
    for (const auto& add : adopted->order_) add(list);
  });
}

void Module::prepend(const std::string& prefix) {
  for (const auto& parameter : own_) parameter->name.insert(0, prefix);
  for (const auto& child : children_) child->prepend(prefix);
}

std::vector<Parameter*> Module::parameters() const {
  std::vector<Parameter*> list;
  for (const auto& add : order_) add(list);
  return list;
}

at::ScalarType held_dtype(const Parameter& parameter, at::ScalarType model_dtype) {
  return parameter.dtype.value_or(model_dtype);
}

void initialize(const std::vector<Parameter*>& parameters, at::ScalarType model_dtype, std::uint64_t seed,
                const MeshPlace& place) {
  for (auto* parameter : parameters) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(
        XXH3_64bits_withSeed(parameter->name.data(), parameter->name.size(), seed));
    auto value = at::empty(parameter->shape, at::TensorOptions().dtype(at::kFloat));
    const auto& init = parameter->init;
    switch (init.kind) {
      case Init::Kind::kNormal:
        value.normal_(init.a, init.b, generator);
        break;
      case Init::Kind::kConstant:
        value.fill_(init.a);
        break;
      case Init::Kind::kUniform:
        value.uniform_(init.a, init.b, generator);
        break;
      case Init::Kind::kLogUniform:
        value.uniform_(init.a, init.b, generator).log_();
        break;
      case Init::Kind::kExact:
        value = at::tensor(init.values, at::TensorOptions().dtype(kLong));
        break;
    }
    parameter->value = take_piece(value, *parameter, place).to(held_dtype(*parameter, model_dtype));
  }
}

}  // namespace sluice
