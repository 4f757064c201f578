// SPDX-License-Identifier: Apache-2.0
// The safetensors file: 8 bytes, little-endian, with the size of the header; the header, a JSON object of
// {name: {dtype, shape, data_offsets: [begin, end]}} and an optional "__metadata__" of strings; then the tensors' bytes
// without holes. Read by mmap, written as a stream. Format: https://github.com/huggingface/safetensors
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sluice/core/files.h"

namespace sluice {

enum class Dtype : std::uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kF64,
  kI64,
  kU64
};

std::string_view dtype_name(Dtype dtype);  // as the header spells it, e.g. "BF16"
std::optional<Dtype> dtype_from_name(std::string_view name);
std::size_t dtype_bytes(Dtype dtype);  // of one element
bool is_plain_float(Dtype dtype);      // F16, BF16, F32, F64: a value needs no scale beside it

struct TensorInfo {
  std::string name;
  Dtype dtype;
  std::vector<std::int64_t> shape;  // empty for a scalar
  std::int64_t elements() const;
  std::uint64_t bytes() const;
};

std::string shape_text(std::span<const std::int64_t> shape);  // "[4096, 32]"

struct StoredTensor {
  TensorInfo info;
  std::uint64_t begin = 0;  // from the start of the file
};

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
};

// Reads and checks the header of a whole file: sizes against the file, names, dtypes, shapes, and that the tensors'
// bytes follow each other without hole or overlap up to the end. `file` names it in errors. Data error otherwise.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, const std::string& file);

// A mapped file. Its bytes may be written: that changes this process's view alone, so weights are trained in place.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  const std::filesystem::path& path() const { return file_.path(); }
  const std::vector<StoredTensor>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const StoredTensor* find(const std::string& name) const;       // null if there is none
  std::span<std::byte> bytes(const StoredTensor& tensor) const;  // may be unaligned for the dtype

 private:
  MappedFile file_;
  SafetensorsHeader header_;
  std::unordered_map<std::string, std::size_t> index_;
};

// Writes a file whose tensors are known beforehand, as a stream: their bytes come in the order of `tensors`, in pieces
// of any size. The tensors begin at a multiple of 8 bytes; give those of wider dtypes first and each is aligned.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorInfo> tensors);
  void write(std::span<const std::byte> bytes);
  void commit();  // after the last byte

 private:
  AtomicFile file_;
  std::uint64_t expected_ = 0, written_ = 0;
};

}  // namespace sluice
