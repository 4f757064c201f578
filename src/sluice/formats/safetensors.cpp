// SPDX-License-Identifier: Apache-2.0
#include "sluice/formats/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstring>
#include <limits>
#include <set>
#include <tuple>

#include "sluice/core/error.h"
#include "sluice/formats/json.h"

namespace sluice {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensors are used as they lie in the file");

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  std::size_t bytes;
};
constexpr std::array kDtypes = {
    DtypeRow{Dtype::kBool, "BOOL", 1},      DtypeRow{Dtype::kU8, "U8", 1},          DtypeRow{Dtype::kI8, "I8", 1},
    DtypeRow{Dtype::kF8E4M3, "F8_E4M3", 1}, DtypeRow{Dtype::kF8E5M2, "F8_E5M2", 1}, DtypeRow{Dtype::kI16, "I16", 2},
    DtypeRow{Dtype::kU16, "U16", 2},        DtypeRow{Dtype::kF16, "F16", 2},        DtypeRow{Dtype::kBF16, "BF16", 2},
    DtypeRow{Dtype::kI32, "I32", 4},        DtypeRow{Dtype::kU32, "U32", 4},        DtypeRow{Dtype::kF32, "F32", 4},
    DtypeRow{Dtype::kF64, "F64", 8},        DtypeRow{Dtype::kI64, "I64", 8},        DtypeRow{Dtype::kU64, "U64", 8}};

const DtypeRow& row(Dtype dtype) {
  const auto& found = kDtypes[static_cast<std::size_t>(dtype)];
  assert(found.dtype == dtype);
  return found;
}

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference library
constexpr std::size_t kMaxDims = 64;
constexpr std::string_view kMetadata = "__metadata__";

// "1.2 of 4.9 GB"; bytes where the rounded figures would look equal.
std::string have_of_need(std::uint64_t have, std::uint64_t need) {
  constexpr double kGB = 1e9, kMB = 1e6;
  const auto unit = static_cast<double>(need) >= kGB ? kGB : kMB;
  const auto rounded_have = fmt::format("{:.1f}", static_cast<double>(have) / unit);
  const auto rounded_need = fmt::format("{:.1f}", static_cast<double>(need) / unit);
  if (rounded_have == rounded_need) return fmt::format("{} of {} bytes", have, need);
  return fmt::format("{} of {} {}", rounded_have, rounded_need, unit == kGB ? "GB" : "MB");
}

[[noreturn]] void fail_truncated(const std::string& file, std::uint64_t have, std::uint64_t need) {
  fail_data("{} ends early ({}). Download it again.", file, have_of_need(have, need));
}

// Bytes that `shape` of `dtype` takes; nothing if 63 bits cannot hold them, even with its zeros left out.
std::optional<std::uint64_t> checked_bytes(std::span<const std::int64_t> shape, Dtype dtype) {
  auto product = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (const auto size : shape) {
    if (size != 0 && __builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return std::ranges::find(shape, 0) != shape.end() ? 0 : static_cast<std::uint64_t>(product);
}

std::uint64_t unsigned_number(const json& value, const std::string& where, std::string_view what) {
  if (!value.is_number_unsigned()) fail_data("{}: {} must be whole numbers, not negative", where, what);
  return value.get<std::uint64_t>();
}

// One entry of the header. `data` is where the tensors' bytes begin in the file.
StoredTensor read_entry(const std::string& name, const json& entry, std::uint64_t data, const std::string& file) {
  const auto where = fmt::format("{}: tensor \"{}\"", file, printable(name));
  if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets")) {
    fail_data("{}: expected dtype, shape and data_offsets, and nothing else", where);
  }
  StoredTensor tensor{.info = {.name = name, .dtype = Dtype::kBool, .shape = {}}};

  const auto& dtype = entry["dtype"];
  const auto known = dtype.is_string() ? dtype_from_name(dtype.get_ref<const std::string&>()) : std::nullopt;
  if (!known)
    fail_data("{}: unknown dtype {}", where, printable(dtype.dump(-1, ' ', false, json::error_handler_t::replace)));
  tensor.info.dtype = *known;

  const auto& shape = entry["shape"];
  if (!shape.is_array() || shape.size() > kMaxDims)
    fail_data("{}: shape must be a list of at most {} sizes", where, kMaxDims);
  for (const auto& size : shape) {
    const auto number = unsigned_number(size, where, "sizes");
    if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      fail_data("{}: size {} is too large", where, number);
    tensor.info.shape.push_back(static_cast<std::int64_t>(number));
  }
  const auto needed = checked_bytes(tensor.info.shape, tensor.info.dtype);
  if (!needed) fail_data("{}: {} has more elements than 63 bits count", where, shape_text(tensor.info.shape));

  const auto& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) fail_data("{}: data_offsets must be [begin, end]", where);
  const auto begin = unsigned_number(offsets[0], where, "data_offsets");
  const auto end = unsigned_number(offsets[1], where, "data_offsets");
  if (end < begin || end - begin != *needed) {
    fail_data("{}: {} {} takes {} bytes, but data_offsets are [{}, {}]", where, shape_text(tensor.info.shape),
              dtype_name(tensor.info.dtype), *needed, begin, end);
  }
  if (__builtin_add_overflow(data, begin, &tensor.begin)) fail_data("{}: data_offsets are too large", where);
  return tensor;
}

std::map<std::string, std::string> read_metadata(const json& entry, const std::string& file) {
  if (!entry.is_object()) fail_data("{}: {} must be an object of strings", file, kMetadata);
  std::map<std::string, std::string> metadata;
  for (const auto& [name, value] : entry.items()) {
    if (!value.is_string()) fail_data("{}: {} entry \"{}\" must be a string", file, kMetadata, printable(name));
    metadata.emplace(name, value.get<std::string>());
  }
  return metadata;
}

}  // namespace

std::string_view dtype_name(Dtype dtype) { return row(dtype).name; }
std::size_t dtype_bytes(Dtype dtype) { return row(dtype).bytes; }

std::optional<Dtype> dtype_from_name(std::string_view name) {
  const auto found = std::ranges::find(kDtypes, name, &DtypeRow::name);
  return found == kDtypes.end() ? std::nullopt : std::optional(found->dtype);
}

bool is_plain_float(Dtype dtype) {
  return dtype == Dtype::kF16 || dtype == Dtype::kBF16 || dtype == Dtype::kF32 || dtype == Dtype::kF64;
}

std::int64_t TensorInfo::elements() const { return static_cast<std::int64_t>(bytes() / dtype_bytes(dtype)); }

std::uint64_t TensorInfo::bytes() const {
  const auto size = checked_bytes(shape, dtype);
  assert(size);
  return *size;
}

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, const std::string& file) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.starts_with("version https://git-lfs")) {
    fail_data("{} is a Git LFS pointer, not the weights. Fetch them with `git lfs pull`.", file);
  }
  if (bytes.size() < kLengthBytes) fail_truncated(file, bytes.size(), kLengthBytes);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    fail_data("{}: not a safetensors file: its header would have {} bytes, and {} is the most", file, header_bytes,
              kMaxHeaderBytes);
  }
  const auto data = kLengthBytes + header_bytes;
  if (bytes.size() < data) fail_truncated(file, bytes.size(), data);

  const auto parsed = parse_json(text.substr(kLengthBytes, header_bytes), file + " (header)");
  if (!parsed.is_object()) fail_data("{}: the header must be a JSON object", file);
  SafetensorsHeader header;
  for (const auto& [name, entry] : parsed.items()) {
    if (name == kMetadata) {
      header.metadata = read_metadata(entry, file);
    } else {
      header.tensors.push_back(read_entry(name, entry, data, file));
    }
  }
  // Tensors without elements share their begin with the next one and stand before it.
  std::ranges::sort(header.tensors, {}, [](const StoredTensor& tensor) {
    return std::tuple(tensor.begin, tensor.info.bytes(), std::string_view(tensor.info.name));
  });
  auto end = data;
  for (const auto& tensor : header.tensors) {
    if (tensor.begin != end) {
      fail_data("{}: tensor \"{}\" begins at byte {}, but {} is where the one before it ends; the file is damaged",
                file, printable(tensor.info.name), tensor.begin, end);
    }
    if (__builtin_add_overflow(end, tensor.info.bytes(), &end)) fail_data("{}: data_offsets are too large", file);
  }
  if (bytes.size() < end) fail_truncated(file, bytes.size(), end);
  if (bytes.size() > end) {
    fail_data("{}: {} bytes follow the last tensor; the file is damaged. Download it again.", file, bytes.size() - end);
  }
  return header;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(path, MappedFile::Access::kCopyOnWrite), header_(parse_safetensors_header(file_.bytes(), path.string())) {
  for (std::size_t i = 0; i < header_.tensors.size(); ++i) index_.emplace(header_.tensors[i].info.name, i);
}

const StoredTensor* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.tensors[found->second];
}

std::span<std::byte> SafetensorsFile::bytes(const StoredTensor& tensor) const {
  return file_.writable_bytes().subspan(tensor.begin, tensor.info.bytes());
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorInfo> tensors)
    : file_(path) {
  std::set<std::string_view> names;
  std::string text = fmt::format(R"({{"{}":{{"format":"pt"}})", kMetadata);
  for (const auto& tensor : tensors) {
    if (!names.insert(tensor.name).second || tensor.name == kMetadata) {
      fail(ExitCode::kRuntime, "{}: tensor \"{}\" cannot be written twice", path.string(), printable(tensor.name));
    }
    const auto end = expected_ + tensor.bytes();
    const json entry = {
        {"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {expected_, end}}};
    text += fmt::format(",{}:{}", json(tensor.name).dump(), entry.dump());
    expected_ = end;
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the tensors then begin at a multiple of 8 bytes
  const std::uint64_t header_bytes = text.size();
  if (header_bytes > kMaxHeaderBytes) {
    fail(ExitCode::kRuntime, "{}: a header of {} bytes; {} is the most that readers accept", path.string(),
         header_bytes, kMaxHeaderBytes);
  }
  file_.write(std::as_bytes(std::span(&header_bytes, 1)));
  file_.write(text);
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  written_ += bytes.size();
  assert(written_ <= expected_);
  file_.write(bytes);
}

void SafetensorsWriter::commit() {
  assert(written_ == expected_);
  file_.commit();
}

}  // namespace sluice
