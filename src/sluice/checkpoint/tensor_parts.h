// SPDX-License-Identifier: Apache-2.0
// Tensors that several ranks hold in parts, as training checkpoints have them: any layout reads out of the parts what
// it needs, whatever layout wrote them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/layers/split.h"

namespace sluice {

struct TensorPart {
  Box box;        // of the whole tensor
  Tensor values;  // [box.rows, box.columns]
};

struct TensorParts {
  std::string name;
  std::vector<std::int64_t> shape;  // of the whole
  std::vector<TensorPart> parts;    // that are at hand
};
TensorParts whole_tensor(std::string name, const Tensor& tensor);

// Copies the boxes, which lie one below the other in `to` [rows, columns], out of the parts. Data error unless the
// parts lie within the tensor and cover the boxes.
void copy_boxes(const TensorParts& from, const std::vector<Box>& boxes, const Tensor& to);

// The whole tensor; it shares memory with a part that is all of it. Data error as copy_boxes().
Tensor assemble(const TensorParts& from);

// How a part is named in a file: as the tensor where it is all of it and has its shape, otherwise
// "NAME of [4096, 1024] at 128,0", by the tensor's shape and the first row and column of its 2-D view.
std::string part_name(const TensorParts& tensor, const TensorPart& part);
// As part_name() gave it, of a tensor that is stored with this shape. None: it is no such name.
struct PartName {
  std::string tensor;
  std::vector<std::int64_t> shape;
  Box box;
};
std::optional<PartName> parse_part_name(std::string_view name, std::span<const std::int64_t> stored);

}  // namespace sluice
