// SPDX-License-Identifier: Apache-2.0
// A parameter is declared once, where it is used. Loader, exporter, optimizer groups, initialisation, `sluice inspect`,
// the training checkpoint and the mesh all read this declaration; nobody writes a second list of names.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/layers/split.h"

namespace sluice {

// How a fresh parameter is drawn. The bounds follow the published reference of each family (docs/models.md).
struct Init {
  enum class Kind { kNormal, kConstant, kUniform, kLogUniform, kExact };
  Kind kind = Kind::kConstant;
  double a = 0, b = 0;
  std::vector<std::int64_t> values = {};
  static Init normal(double standard_deviation) { return {Kind::kNormal, 0, standard_deviation}; }
  static Init constant(double value) { return {Kind::kConstant, value, 0}; }
  static Init uniform(double low, double high) { return {Kind::kUniform, low, high}; }
  static Init log_uniform(double low, double high) { return {Kind::kLogUniform, low, high}; }  // log(U(low, high))
  // A 1-D int64 tensor that follows from the configuration: a file that holds other values is refused.
  static Init exactly(std::vector<std::int64_t> values) { return {Kind::kExact, 0, 0, std::move(values)}; }
};

struct LoraAdapter;

struct Parameter {
  std::string name;                          // as the checkpoint spells it, e.g. "model.layers.0.linear_attn.A_log"
  std::vector<std::int64_t> shape;           // of the whole, as on disk
  std::optional<at::ScalarType> dtype = {};  // held in this whatever the model's precision; none: the model's
  bool decay = true;                         // takes weight decay
  bool frozen = false;     // never trained: no gradient, no optimizer state; an export has what its source has
  bool as_stored = false;  // a frozen table read by rows: held in the file's dtype, over its mapping, never copied
  bool adaptable = false;  // a projection, y = x W^T, that can have an adapter (layers/lora.h)
  Split split = {};        // over the ranks of a mesh; `value` is this rank's piece
  Init init;
  double stored_scale = 1;  // of an as_stored parameter: its values are this times what is stored
  Tensor value = {};        // undefined until initialize() or the loader sets it
  std::vector<Tensor> pieces =
      {};  // of an as_stored parameter that lies in pieces: its rows in order, instead of value
  std::shared_ptr<LoraAdapter> adapter = {};
  std::int64_t size() const;  // number of elements of the whole
};

std::int64_t count_elements(const std::vector<Parameter*>& parameters);

// Part of a model: owns parameters and names its children. Building one allocates nothing.
class Module {
 public:
  Module() = default;
  virtual ~Module() = default;
  Module(const Module&) = delete;  // children are known by address
  Module& operator=(const Module&) = delete;

  // Every parameter below this module in the order of declaration, with full names.
  std::vector<Parameter*> parameters() const;

 protected:
  // `name` is relative to this module; parent modules put theirs before it.
  Parameter& declare(Parameter parameter);

  // Takes over a part under `name`; its parameters get that name before theirs.
  template <typename Child>
  Child& add(const std::string& name, std::unique_ptr<Child> child) {
    auto& part = *child;
    adopt(name, std::move(child));
    return part;
  }

 private:
  void adopt(const std::string& name, std::unique_ptr<Module> child);
  void prepend(const std::string& prefix);

  std::vector<std::unique_ptr<Parameter>> own_;
  std::vector<std::unique_ptr<Module>> children_;
  std::vector<std::function<void(std::vector<Parameter*>&)>> order_;  // own parameters and children as declared
};

// The dtype in which a model of precision `model_dtype` holds this parameter.
at::ScalarType held_dtype(const Parameter& parameter, at::ScalarType model_dtype);

// Allocates and draws every parameter from `seed`. A parameter's values depend on the seed and its name alone, so
// adding a layer does not change the others; a rank of a mesh keeps its piece of them.
void initialize(const std::vector<Parameter*>& parameters, at::ScalarType model_dtype, std::uint64_t seed,
                const MeshPlace& place = {});

}  // namespace sluice
