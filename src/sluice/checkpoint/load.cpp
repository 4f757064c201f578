// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/load.h"

#include <map>

#include "sluice/checkpoint/tensor_io.h"
#include "sluice/core/log.h"

namespace sluice {

std::string LoadReport::aside_line() const {
  std::map<std::string, int> counts;
  for (const auto& row : rows) {
    if (row.parameter.empty()) ++counts[row.aside_reason];
  }
  std::string line;
  for (const auto& [reason, count] : counts) {
    line += fmt::format("{}{} tensor{} ({})", line.empty() ? "" : ", ", count, count == 1 ? "" : "s", reason);
  }
  return line.empty() ? line : "set aside: " + line;
}

std::vector<WantedTensor> wanted_tensors(const std::vector<Parameter*>& parameters) {
  std::vector<WantedTensor> wanted;
  wanted.reserve(parameters.size());
  for (const auto* parameter : parameters) {
    const bool floating = !parameter->dtype || at::isFloatingType(*parameter->dtype);
    wanted.push_back({parameter->name, parameter->shape, floating});
  }
  return wanted;
}

std::vector<MappedTensor> map_folder(const ModelFolder& folder, const std::vector<Parameter*>& parameters,
                                     const WeightRules& rules) {
  std::vector<TensorInfo> on_disk;
  on_disk.reserve(folder.tensors().size());
  for (const auto& tensor : folder.tensors()) on_disk.push_back(tensor.info());
  return map_weights(folder.path().string(), on_disk, wanted_tensors(parameters), rules);
}

LoadReport load_parameters(const ModelFolder& folder, const std::vector<Parameter*>& parameters,
                           const WeightRules& rules, at::ScalarType model_dtype) {
  const at::NoGradGuard no_grad;
  const auto map = map_folder(folder, parameters, rules);  // before any parameter changes
  LoadReport report;
  report.unlisted = folder.unlisted();
  for (auto* parameter : parameters) parameter->value = Tensor();
  for (std::size_t i = 0; i < map.size(); ++i) {
    const auto& mapped = map[i];
    report.rows.push_back({mapped.disk, {}, mapped.aside_reason});
    if (!mapped.parameter) continue;
    auto& parameter = *parameters[*mapped.parameter];
    report.rows.back().parameter = parameter.name;
    const auto dtype = held_dtype(parameter, model_dtype);
    const auto& tensor = folder.tensors()[i];
    const auto disk = tensor_over(tensor.file, *tensor.stored);
    if (disk.sizes() == parameter.shape) {  // the whole of it
      parameter.value = disk.to(dtype);
      report.shared += parameter.value.const_data_ptr() == tensor.bytes().data() ? 1 : 0;
    } else {
      if (!parameter.value.defined()) parameter.value = at::empty(parameter.shape, at::TensorOptions().dtype(dtype));
      parameter.value.view(-1).narrow(0, mapped.offset, disk.numel()).copy_(disk.reshape(-1));
    }
  }
  if (const auto line = report.aside_line(); !line.empty()) log_info("{}: {}", folder.path().string(), line);
  if (!report.unlisted.empty()) {
    log_warning("{}: {} tensor{} not in {}, not read (first: {})", folder.path().string(), report.unlisted.size(),
                report.unlisted.size() == 1 ? " is" : "s are", kIndexFile, report.unlisted[0]);
  }
  return report;
}

}  // namespace sluice
