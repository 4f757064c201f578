// SPDX-License-Identifier: Apache-2.0
// For tests: safetensors files written byte by byte, right or wrong.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>

#include "sluice/core/files.h"
#include "sluice/core/testing.h"
#include "sluice/formats/safetensors.h"

namespace sluice {

// A safetensors file with this header and so many bytes of data.
inline std::string raw_safetensors(std::string_view header, std::size_t data_bytes) {
  const std::uint64_t size = header.size();
  std::string file(sizeof size, '\0');
  std::memcpy(file.data(), &size, sizeof size);
  return file.append(header).append(data_bytes, '\x01');
}

inline std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// Writes tensors whose bytes all equal `fill`.
inline void write_safetensors(const std::filesystem::path& path, const std::vector<TensorInfo>& tensors,
                              char fill = 1) {
  SafetensorsWriter writer(path, tensors);
  for (const auto& tensor : tensors) writer.write(bytes_of(std::string(tensor.bytes(), fill)));
  writer.commit();
}

}  // namespace sluice
