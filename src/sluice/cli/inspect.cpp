// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/inspect.h"

#include <fmt/format.h>

#include <cstdio>
#include <map>

#include "sluice/checkpoint/load.h"
#include "sluice/formats/model_folder.h"
#include "sluice/models/family.h"

namespace sluice {
namespace {

struct Total {
  std::int64_t tensors = 0, elements = 0;
  std::uint64_t bytes = 0;
  void add(const TensorInfo& info) {
    ++tensors;
    elements += info.elements();
    bytes += info.bytes();
  }
};

void print(const std::string& label, const Total& total) {
  fmt::print("{:<32} {:>7} tensors {:>16} parameters {:>9.3f} GiB\n", label, total.tensors, total.elements,
             static_cast<double>(total.bytes) / (1 << 30));
}

}  // namespace

ExitCode run_inspect(const InspectOptions& options, const Invocation&) {
  const ModelFolder folder(options.path);
  const auto where = (options.path / kConfigFile).string();
  const auto& family = family_of(folder.config(), where);
  const auto model = build_model(folder.config(), where);
  const auto parameters = model.decoder->parameters();
  const auto map = map_folder(folder, parameters, model.weights);

  std::map<std::string, Total> by_dtype, aside;
  Total trained, frozen, tables;
  for (std::size_t i = 0; i < map.size(); ++i) {
    const auto& tensor = map[i];
    const auto& stored = folder.tensors()[i].info();
    if (options.tensors) {
      fmt::print("{:<72} {:<18} {:<8} -> {}\n", stored.name, shape_text(stored.shape), dtype_name(stored.dtype),
                 tensor.runs.empty() ? "set aside: " + tensor.aside_reason : parameter_names(tensor, parameters));
    }
    by_dtype[std::string(dtype_name(stored.dtype))].add(stored);
    const auto* parameter = tensor.runs.empty() ? nullptr : parameters[tensor.runs[0].parameter];
    auto& kind = parameter == nullptr   ? aside[tensor.aside_reason]
                 : parameter->as_stored ? tables
                 : parameter->frozen    ? frozen
                                        : trained;
    kind.add(stored);
  }
  if (options.tensors) fmt::print("\n");
  fmt::print("{:<32} {} (model_type {})\n", "family", family.name, folder.config().value("model_type", ""));
  print("trained", trained);
  if (frozen.tensors > 0) print("frozen", frozen);
  if (tables.tensors > 0) print("frozen, read from the file", tables);
  for (const auto& [reason, total] : aside) print("set aside: " + reason, total);
  for (const auto& [dtype, total] : by_dtype) print("stored as " + dtype, total);
  for (const auto& name : folder.unlisted()) fmt::print("not read (the index does not name it): {}\n", name);
  return ExitCode::kDone;
}

}  // namespace sluice
