// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/load.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cassert>
#include <map>

#include "sluice/checkpoint/tensor_io.h"
#include "sluice/core/error.h"
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
  for (const auto& tensor : folder.tensors()) {
    on_disk.push_back(tensor.info());
    if (tensor.scale != nullptr) on_disk.back().dtype = Dtype::kBF16;  // which is what it is read as
  }
  return map_weights(folder.path().string(), on_disk, wanted_tensors(parameters), rules);
}

std::string parameter_names(const MappedTensor& mapped, const std::vector<Parameter*>& parameters) {
  std::vector<std::string> names;
  for (const auto& run : mapped.runs) {
    const auto& name = parameters[run.parameter]->name;
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

at::ScalarType lossless_dtype(const std::vector<MappedTensor>& map, const std::vector<Parameter*>& parameters) {
  const bool bfloat16 = std::ranges::all_of(map, [&](const MappedTensor& tensor) {
    return tensor.disk.dtype == Dtype::kBF16 || tensor.runs.empty() || parameters[tensor.runs[0].parameter]->dtype;
  });
  return bfloat16 ? kBFloat16 : kFloat;
}

namespace {

// Rows of the whole parameter, from `first` on, to where they belong in its piece.
void copy_rows(const Tensor& rows, std::int64_t first, const Parameter& parameter, const MeshPlace& place) {
  const Box given{.row = first, .rows = rows.size(0), .column = 0, .columns = rows.size(1)};
  const auto piece = rows_view(parameter.value);
  std::int64_t row = 0;
  for (const auto& box : boxes_of(parameter, place)) {
    const auto common = intersection(given, box);
    if (common.elements() > 0) {
      const auto from = rows.narrow(0, common.row - first, common.rows).narrow(1, common.column, common.columns);
      piece.narrow(0, row + common.row - box.row, common.rows).copy_(from);
    }
    row += box.rows;
  }
}

// Copies a tensor's runs, each of whole rows, to where they belong, making room first for parameters that have none.
void copy_runs(const MappedTensor& mapped, const Tensor& disk, const std::vector<Parameter*>& parameters,
               at::ScalarType model_dtype, const MeshPlace& place) {
  const auto flat = disk.reshape(-1);
  std::int64_t at = 0;
  for (const auto& run : mapped.runs) {
    auto& parameter = *parameters[run.parameter];
    if (!parameter.value.defined()) {
      parameter.value =
          at::empty(local_shape(parameter, place), at::TensorOptions().dtype(held_dtype(parameter, model_dtype)));
    }
    const auto columns = whole_box(parameter.shape).columns;
    assert(run.offset % columns == 0 && run.elements % columns == 0);
    copy_rows(flat.narrow(0, at, run.elements).view({-1, columns}), run.offset / columns, parameter, place);
    at += run.elements;
  }
}

// What the map takes of a folder's tensor, in `dtype`; of an as_stored parameter as it lies there, with its scale
// noted.
Tensor read_mapped(const ModelFolder& folder, const ModelFolder::Tensor& tensor, const MappedTensor& mapped,
                   Parameter& parameter, at::ScalarType dtype) {
  Tensor read;
  if (!parameter.as_stored) {
    read = read_tensor(folder, tensor, held_dtype(parameter, dtype));
  } else if (tensor.scale == nullptr) {
    read = tensor_over(tensor.file, *tensor.stored);
  } else if (tensor.scale->info.elements() == 1) {
    read = tensor_over(tensor.file, *tensor.stored);
    parameter.stored_scale = tensor_over(tensor.scale_file, *tensor.scale).item<double>();
  } else {
    read = read_tensor(folder, tensor, kBFloat16);
  }
  return read.sizes() == mapped.disk.shape ? read : read.narrow(0, 0, mapped.disk.shape[0]);
}

// Tensors such as hash constants, which a model is meaningless without.
void check_exact(const ModelFolder& folder, const Parameter& parameter, const std::string& disk_name) {
  if (parameter.init.kind != Init::Kind::kExact) return;
  const auto& wanted = parameter.init.values;
  const auto* found = parameter.value.const_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (found[i] == wanted[i]) continue;
    fail_data(
        "{}: {}[{}]: expected {}, which follows from config.json, found {}.\n"
        "  The weights were trained with other constants; check that config.json is the one of these weights.",
        folder.path().string(), disk_name, i, wanted[i], found[i]);
  }
}

}  // namespace

LoadReport load_parameters(const ModelFolder& folder, const std::vector<Parameter*>& parameters,
                           const WeightRules& rules, at::ScalarType model_dtype, const MeshPlace& place) {
  const at::NoGradGuard no_grad;
  const auto map = map_folder(folder, parameters, rules);  // before any parameter changes
  LoadReport report;
  report.unlisted = folder.unlisted();
  for (auto* parameter : parameters) {
    parameter->value = Tensor();
    parameter->pieces.clear();
    parameter->stored_scale = 1;
  }
  std::map<Parameter*, std::map<std::int64_t, Tensor>> pieces;  // of those held as stored, by offset
  for (std::size_t i = 0; i < map.size(); ++i) {
    const auto& mapped = map[i];
    report.rows.push_back({mapped.disk, parameter_names(mapped, parameters), mapped.aside_reason});
    if (mapped.runs.empty()) continue;
    const auto& tensor = folder.tensors()[i];
    auto& parameter = *parameters[mapped.runs[0].parameter];
    const auto disk = read_mapped(folder, tensor, mapped, parameter, model_dtype);
    if (disk.sizes() == parameter.shape) {  // the whole of it
      parameter.value = take_piece(disk, parameter, place);
      report.shared += disk.const_data_ptr() == tensor.bytes().data() && parameter.value.is_alias_of(disk) ? 1 : 0;
      check_exact(folder, parameter, mapped.disk.name);
    } else if (parameter.as_stored) {
      pieces[&parameter].emplace(mapped.runs[0].offset, disk);
    } else {
      copy_runs(mapped, disk, parameters, model_dtype, place);
    }
  }
  for (const auto& [parameter, by_offset] : pieces) {
    for (const auto& [offset, piece] : by_offset) {
      if (piece.scalar_type() != by_offset.begin()->second.scalar_type()) {
        fail_data(
            "{}: the pieces of {} are of several dtypes, {} and {}; a table is read in the one that it is stored in",
            folder.path().string(), parameter->name, describe(by_offset.begin()->second), describe(piece));
      }
      parameter->pieces.push_back(piece);
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
