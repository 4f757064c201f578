// SPDX-License-Identifier: Apache-2.0
// For tests: folders that vanish, and safetensors files written byte by byte, right or wrong.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "sluice/core/error.h"
#include "sluice/core/files.h"
#include "sluice/formats/safetensors.h"

namespace sluice {

class TestFolder {
 public:
  TestFolder() {
    auto name = (std::filesystem::temp_directory_path() / "sluice-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

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

inline std::string contents(const std::filesystem::path& path) { return read_file(path); }

// The message of the data error that `action` must end in.
template <typename Action>
std::string data_error(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "expected a data error";
  return {};
}

}  // namespace sluice
