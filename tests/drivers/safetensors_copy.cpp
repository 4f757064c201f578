// SPDX-License-Identifier: Apache-2.0
// safetensors_copy IN OUT: reads a file with our reader and writes it with our writer, tensor by tensor.
#include <cstdio>

#include "sluice/core/error.h"
#include "sluice/formats/safetensors.h"

int main(int count, char** arguments) {
  using namespace sluice;
  if (count != 3) {
    std::fputs("usage: safetensors_copy IN OUT\n", stderr);
    return static_cast<int>(ExitCode::kUsage);
  }
  try {
    const SafetensorsFile in(arguments[1]);
    std::vector<TensorInfo> tensors;
    for (const auto& stored : in.tensors()) tensors.push_back(stored.info);
    SafetensorsWriter out(arguments[2], tensors);
    for (const auto& stored : in.tensors()) out.write(in.bytes(stored));
    out.commit();
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.code());
  }
  return 0;
}
