// SPDX-License-Identifier: Apache-2.0
// Any bytes are a safetensors file or a data error; what is read lies inside the file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "sluice/core/error.h"
#include "sluice/formats/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sluice;
  const auto file = std::as_bytes(std::span(data, size));
  try {
    const auto header = parse_safetensors_header(file, "fuzz");
    std::size_t end = 0;
    for (const auto& tensor : header.tensors) {
      if (tensor.begin > size || tensor.info.bytes() > size - tensor.begin) std::abort();
      if (tensor.begin < end) std::abort();  // overlaps the one before
      end = tensor.begin + tensor.info.bytes();
    }
  } catch (const Error& error) {
    if (error.code() != ExitCode::kData) throw;
  }
  return 0;
}
