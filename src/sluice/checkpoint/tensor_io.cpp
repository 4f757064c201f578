// SPDX-License-Identifier: Apache-2.0
#include "sluice/checkpoint/tensor_io.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstdint>

#include "sluice/checkpoint/fp8.h"
#include "sluice/core/error.h"

namespace sluice {
namespace {

constexpr std::array<std::pair<Dtype, at::ScalarType>, 15> kTypes = {{
    {Dtype::kBool, at::kBool},
    {Dtype::kU8, at::kByte},
    {Dtype::kI8, at::kChar},
    {Dtype::kF8E4M3, at::kFloat8_e4m3fn},
    {Dtype::kF8E5M2, at::kFloat8_e5m2},
    {Dtype::kI16, at::kShort},
    {Dtype::kU16, at::kUInt16},
    {Dtype::kF16, at::kHalf},
    {Dtype::kBF16, at::kBFloat16},
    {Dtype::kI32, at::kInt},
    {Dtype::kU32, at::kUInt32},
    {Dtype::kF32, at::kFloat},
    {Dtype::kF64, at::kDouble},
    {Dtype::kI64, at::kLong},
    {Dtype::kU64, at::kUInt64},
}};

}  // namespace

at::ScalarType scalar_type(Dtype dtype) {
  return std::ranges::find(kTypes, dtype, [](const auto& pair) { return pair.first; })->second;
}

Dtype stored_dtype(at::ScalarType type) {
  const auto* found = std::ranges::find(kTypes, type, [](const auto& pair) { return pair.second; });
  SLUICE_CHECK(found != kTypes.end(), "a tensor of type {} cannot be stored", at::toString(type));
  return found->first;
}

Tensor tensor_over(const std::shared_ptr<const SafetensorsFile>& file, const StoredTensor& stored) {
  const auto bytes = file->bytes(stored);
  const auto options = at::TensorOptions().dtype(scalar_type(stored.info.dtype));
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % dtype_bytes(stored.info.dtype) != 0) {
    auto copy = at::empty(stored.info.shape, options);
    std::ranges::copy(bytes, static_cast<std::byte*>(copy.data_ptr()));
    return copy;
  }
  return at::from_blob(
      bytes.data(), stored.info.shape, [file](void*) {}, options);
}

Tensor read_tensor(const ModelFolder& folder, const ModelFolder::Tensor& tensor, at::ScalarType dtype) {
  const auto stored = tensor_over(tensor.file, *tensor.stored);
  if (tensor.scale == nullptr) return stored.to(dtype);
  return fp8_values(stored, tensor_over(tensor.scale_file, *tensor.scale), folder.fp8_block(), dtype);
}

TensorInfo tensor_info(std::string name, const Tensor& tensor) {
  return {std::move(name), stored_dtype(tensor.scalar_type()), tensor.sizes().vec()};
}

std::span<const std::byte> tensor_bytes(const Tensor& tensor) {
  assert(tensor.is_contiguous() && tensor.device().is_cpu());
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

}  // namespace sluice
