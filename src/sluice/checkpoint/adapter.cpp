// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/adapter.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "sluice/checkpoint/tensor_io.h"
#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/formats/json.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr auto kAdapterConfig = "adapter_config.json";
constexpr auto kAdapterWeights = "adapter_model.safetensors";
constexpr std::string_view kModel = "base_model.model.";
constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight", kWeight = ".weight", kWrapper = ".base_layer";

// An adapter as PEFT has it.
struct PeftAdapter {
  std::string module;  // in transformers' model
  Tensor A, B;         // [rank, in], [out, rank]; of experts [E rank, in], [out, rank E]
  double alpha = 0;
  bool rank_stabilised = false;
  double scale(std::int64_t rank) const {  // of B A
    const auto r = static_cast<double>(rank);
    return alpha / (rank_stabilised ? std::sqrt(r) : r);
  }
};

// What an adapter can be for, as PEFT's configuration names it: among its target_modules or its target_parameters.
struct PeftTarget {
  std::string name, short_name;  // the end of the name that all of the kind share
  bool is_parameter, adapted;
};

std::string_view parent(std::string_view name) { return name.substr(0, name.rfind('.')); }

// The last `parts` parts of a dotted name.
std::string name_end(std::string_view name, int parts) {
  auto dot = name.size();
  for (int i = 0; i < parts && dot != std::string_view::npos && dot > 0; ++i) dot = name.rfind('.', dot - 1);
  return std::string(dot == std::string_view::npos ? name : name.substr(dot + 1));
}

// PEFT takes modules of these names in a model with routed experts for those of the experts (peft 0.21,
// transformers_weight_conversion.py). Others of the name can be reached as parameters.
bool means_experts(std::string_view module) {
  const auto name = name_end(module, 1);
  return name == "gate_proj" || name == "up_proj" || name == "down_proj";
}

// For each parameter of an interleaved tensor: where on disk its rows lie, in their order.
std::map<std::string, std::vector<std::int64_t>> rows_of(const WeightRules::Interleaved& rule) {
  std::map<std::string, std::map<std::int64_t, std::int64_t>> places;  // row of the parameter to row on disk
  std::int64_t row = 0;
  for (const auto& stretch : rule.stretches()) {
    for (std::int64_t i = 0; i < stretch.rows; ++i) places[stretch.parameter][stretch.first_row + i] = row++;
  }
  std::map<std::string, std::vector<std::int64_t>> rows;
  for (const auto& [parameter, of] : places) {
    for (const auto& [own, on_disk] : of) rows[parameter].push_back(on_disk);
  }
  return rows;
}

class Layout {
 public:
  Layout(const std::vector<Parameter*>& parameters, const WeightRules& rules) : rules_(rules) {
    for (auto* parameter : parameters) {
      if (!parameter->adaptable) continue;
      adaptable_.push_back(parameter);
      if (!is_experts(*parameter)) by_module_[module_name(*parameter)] = parameter;
    }
  }

  std::vector<PeftAdapter> to_peft() const {
    std::vector<PeftAdapter> adapters;
    for (const auto* parameter : adaptable_) {
      if (!parameter->adapter) continue;
      const auto interleaving = interleaving_of(parameter->name, rules_);
      if (interleaving.rule == nullptr) {
        adapters.push_back(is_experts(*parameter) ? of_experts(*parameter) : plain(*parameter));
        continue;
      }
      const auto module = joined_module(interleaving);
      const auto same = [&](const PeftAdapter& adapter) { return adapter.module == module; };
      if (std::ranges::none_of(adapters, same)) adapters.push_back(join(interleaving));
    }
    return adapters;
  }

  // False if no parameter has that module. `experts`: those of the names of experts' tensors that are adapted.
  bool take(const PeftAdapter& adapter, const std::vector<std::string>& experts, at::ScalarType dtype) const {
    const auto set = [&](Parameter& parameter, const Tensor& A, const Tensor& B) {
      set_adapter(parameter, A.to(dtype).contiguous(), B.to(dtype).contiguous(), adapter.scale(A.size(-2)));
    };
    if (const auto found = by_module_.find(adapter.module); found != by_module_.end()) {
      set(*found->second, adapter.A, adapter.B);
      return true;
    }
    for (const auto& rule : rules_.interleaved) {
      const auto tensor = adapter.module + std::string(kWeight);
      if (!tensor.ends_with(rule.tensor)) continue;
      const auto beginning = tensor.substr(0, tensor.size() - rule.tensor.size());
      for (const auto& [part, rows] : rows_of(rule)) {
        set(part_of(beginning, part), adapter.A, adapter.B.index_select(0, at::tensor(rows, at::kLong)));
      }
      return true;
    }
    if (auto* parameter = expert_of(adapter.module, experts)) {
      const auto count = parameter->shape[0], rank = adapter.A.size(0) / count;
      SLUICE_CHECK(rank > 0 && rank * count == adapter.A.size(0), "{}: rank {} is not one for each of {} experts",
                   adapter.module, adapter.A.size(0), count);
      set(*parameter, adapter.A.reshape({count, rank, -1}), adapter.B.reshape({-1, rank, count}).permute({2, 0, 1}));
      return true;
    }
    return false;
  }

  std::vector<PeftTarget> targets() const {
    const bool routed = std::ranges::any_of(adaptable_, [](const auto* parameter) { return is_experts(*parameter); });
    std::vector<PeftTarget> targets;
    for (const auto* parameter : adaptable_) {
      const auto interleaving = interleaving_of(parameter->name, rules_);
      auto name = interleaving.rule ? joined_module(interleaving) : module_name(*parameter);
      const auto same = [&](const PeftTarget& target) { return target.name == name; };
      const auto known = std::ranges::find_if(targets, same);
      if (known != targets.end()) known->adapted = known->adapted || parameter->adapter;
      else targets.push_back(target_of(*parameter, std::move(name), routed));
    }
    return targets;
  }

 private:
  static PeftTarget target_of(const Parameter& parameter, std::string name, bool routed) {
    const bool adapted = parameter.adapter != nullptr;
    if (is_experts(parameter)) return {name, name_end(name, 2), /*is_parameter=*/true, adapted};
    if (!routed || !means_experts(name)) return {name, name_end(name, 1), /*is_parameter=*/false, adapted};
    name += kWeight;
    return {name, name_end(name, 3), /*is_parameter=*/true, adapted};
  }

  // The module on disk of the tensor that holds a parameter with others.
  static std::string joined_module(const Interleaving& interleaving) {
    const auto tensor = interleaving.beginning + interleaving.rule->tensor;
    return tensor.substr(0, tensor.size() - kWeight.size());
  }

  Parameter& part_of(const std::string& beginning, const std::string& part) const {
    const auto name = beginning + part;
    return *by_module_.at(name.substr(0, name.size() - kWeight.size()));
  }

  static PeftAdapter plain(const Parameter& parameter) {
    const auto& [A, B, scale, dropout] = *parameter.adapter;
    return {module_name(parameter), A.value, B.value, scale * static_cast<double>(A.shape[0])};
  }

  PeftAdapter of_experts(const Parameter& parameter) const {
    const auto& [A, B, scale, dropout] = *parameter.adapter;
    auto module = std::string(parent(parameter.name));
    bool after = false;  // wrappers of tensors declared after this one lie around it
    for (const auto* other : adaptable_) {
      if (after && other->adapter && is_experts(*other) && parent(other->name) == parent(parameter.name)) {
        module += kWrapper;
      }
      after = after || other == &parameter;
    }
    const auto rank = A.shape[1];
    return {module, A.value.reshape({-1, A.shape[2]}), B.value.permute({1, 2, 0}).reshape({B.shape[1], -1}),
            scale * static_cast<double>(rank)};
  }

  // The adapters of all parts as one: A one below the other, and columns of B for each.
  PeftAdapter join(const Interleaving& interleaving) const {
    std::int64_t disk_rows = 0, rank = 0;
    double scale = 0;  // of all of them: they were made together
    std::vector<Tensor> all_a, all_b;
    for (const auto& stretch : interleaving.rule->stretches()) disk_rows += stretch.rows;
    for (const auto& [part, rows] : rows_of(*interleaving.rule)) {
      const auto& parameter = part_of(interleaving.beginning, part);
      if (!parameter.adapter) continue;
      const auto &A = parameter.adapter->A.value, &B = parameter.adapter->B.value;
      all_a.push_back(A);
      all_b.push_back(at::zeros({disk_rows, A.size(0)}, B.options()).index_copy_(0, at::tensor(rows, at::kLong), B));
      rank += A.size(0);
      scale = parameter.adapter->scale;
    }
    return {joined_module(interleaving), at::cat(all_a, 0), at::cat(all_b, 1), scale * static_cast<double>(rank)};
  }

  // The tensor that a wrapper around a module of experts adapts: the outermost the last declared, and so on inwards.
  Parameter* expert_of(std::string module, const std::vector<std::string>& experts) const {
    std::size_t depth = 0;
    for (; module.ends_with(kWrapper); ++depth) module.resize(module.size() - kWrapper.size());
    std::vector<Parameter*> adapted;
    for (auto* parameter : adaptable_) {
      const auto named = [&](const std::string& target) {
        return parameter->name == target || parameter->name.ends_with("." + target);
      };
      if (is_experts(*parameter) && parent(parameter->name) == module && std::ranges::any_of(experts, named)) {
        adapted.push_back(parameter);
      }
    }
    return depth < adapted.size() ? adapted[adapted.size() - 1 - depth] : nullptr;
  }

  const WeightRules& rules_;
  std::vector<Parameter*> adaptable_;
  std::map<std::string, Parameter*> by_module_;  // without experts, whose tensors are no modules
};

// The names of what is adapted: the short one where everything of that name is.
std::vector<std::string> adapted_names(const std::vector<PeftTarget>& targets, bool parameters) {
  std::vector<std::string> names;
  for (const auto& target : targets) {
    if (!target.adapted || target.is_parameter != parameters) continue;
    const bool all = std::ranges::all_of(targets, [&](const PeftTarget& other) {
      return other.is_parameter != parameters || other.short_name != target.short_name || other.adapted;
    });
    const auto& name = all ? target.short_name : target.name;
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return names;
}

// The prefix of the names that a folder has; null: none.
const WeightRules::Prefix* folder_prefix(const ModelFolder& folder, const WeightRules& rules) {
  for (const auto& tensor : folder.tensors()) {
    if (const auto* prefix = prefix_of(tensor.info().name, rules)) return prefix;
  }
  return nullptr;
}

// What of PEFT's configuration we follow; the rest must be at its default.
struct PeftConfig {
  std::int64_t rank;
  double alpha;
  bool rank_stabilised;
  std::vector<std::string> experts;  // target_parameters
  std::map<std::string, double> alpha_pattern;
};

PeftConfig read_config(const fs::path& path) {
  const auto config = read_json_object(path, kMaxConfigBytes);
  const auto where = path.string();
  const auto is_off = [](const json& value) {
    return value.is_null() || value == false || value == "none" || (value.is_structured() && value.empty());
  };
  if (config.value("peft_type", json()) != "LORA") {
    fail_data("{}: peft_type is {}; only LORA is supported", where, config.value("peft_type", json()).dump());
  }
  for (const auto* key : {"bias", "fan_in_fan_out", "use_dora", "use_qalora", "use_bdlora", "lora_bias",
                          "modules_to_save", "layer_replication", "trainable_token_indices"}) {
    const auto value = config.value(key, json());
    if (!is_off(value)) fail_data("{}: {} is {}, which is not supported", where, key, printable(value.dump()));
  }
  const auto number = [&](const char* key) {
    const auto value = config.value(key, json());
    if (!value.is_number() || value <= 0) {
      fail_data("{}: {} must be a number above 0, got {}", where, key, printable(value.dump()));
    }
    return value.get<double>();
  };
  PeftConfig read{.rank = static_cast<std::int64_t>(number("r")),
                  .alpha = number("lora_alpha"),
                  .rank_stabilised = config.value("use_rslora", json()) == true,
                  .experts = {},
                  .alpha_pattern = {}};
  const auto targets = config.value("target_parameters", json());
  for (const auto& target : targets) {
    if (target.is_string()) read.experts.push_back(target.get<std::string>());
  }
  const auto alphas = config.value("alpha_pattern", json::object());
  for (const auto& [pattern, alpha] : alphas.items()) {
    if (!alpha.is_number()) fail_data("{}: alpha_pattern must hold numbers", where);
    constexpr std::string_view kAny = ".*\\.";  // the one expression that PEFT writes by itself
    const auto name = pattern.starts_with(kAny) ? pattern.substr(kAny.size()) : pattern;
    if (name.find_first_of("\\*+?[](){}^$|") != std::string::npos) {
      fail_data("{}: alpha_pattern {} is a regular expression; only names are supported", where, printable(pattern));
    }
    read.alpha_pattern[name] = alpha.get<double>();
  }
  return read;
}

}  // namespace

void export_adapter(const fs::path& out, const std::vector<Parameter*>& parameters, const LoraSettings& settings,
                    const ModelFolder& base, const WeightRules& rules) {
  const at::NoGradGuard no_grad;
  const Layout layout(parameters, rules);
  const auto* prefix = folder_prefix(base, rules);
  json rank_pattern = json::object(), alpha_pattern = json::object();
  std::vector<std::pair<TensorInfo, Tensor>> tensors;
  for (const auto& adapter : layout.to_peft()) {
    const auto module = disk_name(adapter.module, prefix);
    const auto add = [&](std::string_view suffix, const Tensor& value) {
      const auto dense = value.to(at::kCPU).contiguous();
      tensors.emplace_back(tensor_info(std::string(kModel) + module + std::string(suffix), dense), dense);
    };
    add(kA, adapter.A);
    add(kB, adapter.B);
    if (adapter.alpha != settings.alpha) {  // joined: the ranks of its parts together
      rank_pattern[module] = adapter.A.size(0);
      alpha_pattern[module] = adapter.alpha;
    }
  }
  auto targets = layout.targets();
  for (auto& target : targets) target.name = disk_name(target.name, prefix);
  const auto target_parameters = adapted_names(targets, /*parameters=*/true);
  const json config = {{"peft_type", "LORA"},
                       {"task_type", "CAUSAL_LM"},
                       {"base_model_name_or_path", base.path().string()},
                       {"r", settings.rank},
                       {"lora_alpha", settings.alpha},
                       {"lora_dropout", settings.dropout},
                       {"target_modules", adapted_names(targets, /*parameters=*/false)},
                       {"target_parameters", target_parameters.empty() ? json() : json(target_parameters)},
                       {"rank_pattern", rank_pattern},
                       {"alpha_pattern", alpha_pattern},
                       {"bias", "none"},
                       {"fan_in_fan_out", false},
                       {"use_rslora", false},
                       {"use_dora", false},
                       {"inference_mode", true},
                       {"init_lora_weights", true}};
  AtomicFolder folder(out);
  write_file(folder.path() / kAdapterConfig, config.dump(2) + "\n");
  std::vector<TensorInfo> infos;
  for (const auto& [info, value] : tensors) infos.push_back(info);
  SafetensorsWriter writer(folder.path() / kAdapterWeights, infos);
  for (const auto& [info, value] : tensors) writer.write(tensor_bytes(value));
  writer.commit();
  folder.commit();
}

LoraSettings load_adapter(const fs::path& folder, const std::vector<Parameter*>& parameters, const WeightRules& rules,
                          at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  if (!fs::exists(folder / kAdapterConfig)) {
    const auto exported = folder / kExportFolder;
    fail_data("{}: no {}; {}", folder.string(), kAdapterConfig,
              fs::exists(exported / kAdapterConfig)
                  ? fmt::format("it is the folder of a training run; give the adapter that the run exported: {}",
                                exported.string())
                  : "is it the folder of an adapter?");
  }
  const auto config = read_config(folder / kAdapterConfig);
  const auto file = std::make_shared<const SafetensorsFile>(folder / kAdapterWeights);
  const auto where = file->path().string();
  std::map<std::string, PeftAdapter> adapters;  // by module
  for (const auto& stored : file->tensors()) {
    std::string_view name = stored.info.name;
    const bool is_a = name.ends_with(kA), known = name.starts_with(kModel) && (is_a || name.ends_with(kB));
    if (!known || stored.info.shape.size() != 2 || stored.info.elements() == 0 || !is_plain_float(stored.info.dtype)) {
      fail_data("{}: {} {} {} is no matrix of a LoRA adapter, {}MODULE.lora_A.weight or .lora_B.weight", where,
                printable(name), dtype_name(stored.info.dtype), shape_text(stored.info.shape), kModel);
    }
    name.remove_prefix(kModel.size());
    name.remove_suffix(is_a ? kA.size() : kB.size());
    auto& adapter = adapters[memory_name(std::string(name), rules)];
    (is_a ? adapter.A : adapter.B) = tensor_over(file, stored);
  }
  const Layout layout(parameters, rules);
  std::vector<std::string> strange;
  for (auto& [module, adapter] : adapters) {
    if (!adapter.A.defined() || !adapter.B.defined()) {
      fail_data("{}: {} has only one of lora_A and lora_B", where, printable(module));
    }
    if (adapter.A.size(0) != adapter.B.size(1)) {
      fail_data("{}: {}: lora_A is {} and lora_B {}, of different ranks", where, printable(module), describe(adapter.A),
                describe(adapter.B));
    }
    adapter.module = module;
    adapter.alpha = config.alpha;
    for (const auto& [name, alpha] : config.alpha_pattern) {
      const auto own = memory_name(name, rules);
      if (module == own || module.ends_with("." + own)) adapter.alpha = alpha;
    }
    adapter.rank_stabilised = config.rank_stabilised;
    try {
      if (!layout.take(adapter, config.experts, dtype)) strange.push_back(module);
    } catch (const Error& error) {
      fail_data("{}: {}", where, error.what());
    }
  }
  if (adapters.empty()) fail_data("{}: holds no adapter", where);
  if (!strange.empty()) {
    fail_data(
        "{}: {} of {} adapters belong to no projection of this model, the first to {}; is it the adapter of another "
        "model?",
        where, strange.size(), adapters.size(), printable(strange[0]));
  }
  for (auto* parameter : parameters) parameter->frozen = true;
  return {.rank = config.rank, .alpha = config.alpha};
}

void merge_adapters(const std::vector<Parameter*>& parameters) {
  const at::NoGradGuard no_grad;
  for (auto* parameter : parameters) {
    if (!parameter->adapter) continue;
    parameter->value = (parameter->value.to(kFloat) + parameter->adapter->product()).to(parameter->value.scalar_type());
    parameter->adapter = nullptr;
  }
}

}  // namespace sluice
