// SPDX-License-Identifier: Apache-2.0
// Between tensors of a file and tensors of libtorch.
#pragma once

#include <memory>
#include <span>

#include "sluice/core/tensor.h"
#include "sluice/formats/model_folder.h"
#include "sluice/formats/safetensors.h"

namespace sluice {

at::ScalarType scalar_type(Dtype dtype);
Dtype stored_dtype(at::ScalarType type);  // fails for a type that safetensors has no name for

// A tensor over the file's mapping, which it keeps open: no copy, and writing to it changes this process's view alone.
// Copied where the file did not align it for its dtype.
Tensor tensor_over(const std::shared_ptr<const SafetensorsFile>& file, const StoredTensor& stored);

// A folder's tensor in `dtype`: over the mapping where it has that dtype, otherwise converted. FP8 is multiplied by its
// scales.
Tensor read_tensor(const ModelFolder& folder, const ModelFolder::Tensor& tensor, at::ScalarType dtype);

// What a tensor is on disk, under `name`.
TensorInfo tensor_info(std::string name, const Tensor& tensor);

// The bytes of a contiguous CPU tensor.
std::span<const std::byte> tensor_bytes(const Tensor& tensor);

}  // namespace sluice
