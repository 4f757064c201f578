// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/model_loading.h"

#include "sluice/checkpoint/adapter.h"
#include "sluice/core/error.h"
#include "sluice/core/log.h"

namespace sluice {
namespace {

at::ScalarType scalar_type_of(Precision precision) { return precision == Precision::kFloat32 ? kFloat : kBFloat16; }

// The GPU only if the model runs there.
ComputeDevice choose_device(const Decoder& decoder, DeviceChoice choice, std::optional<Precision> precision,
                            std::int64_t gpu) {
  const auto reason = decoder.why_not_on_gpu(precision ? scalar_type_of(*precision) : kBFloat16);
  if (reason.empty()) return open_device(choice, gpu);
  if (choice == DeviceChoice::kCuda) fail_usage("device cuda: {}.\n  Take device cpu.", reason);
  if (choice == DeviceChoice::kAuto && has_gpu()) log_info("device: the CPU, not the GPU: {}", reason);
  return {};
}

}  // namespace

LoadedModel open_model(const std::filesystem::path& path, DeviceChoice device, std::optional<Precision> precision,
                       const BuildOptions& options, std::int64_t gpu) {
  LoadedModel loaded{.folder = std::make_unique<ModelFolder>(path), .model = {}, .device = {}, .dtype = {}};
  const auto where = (path / kConfigFile).string();
  loaded.model = build_model(loaded.folder->config(), where, options);
  loaded.device = choose_device(*loaded.model.decoder, device, precision, gpu);
  loaded.dtype = precision ? scalar_type_of(*precision) : loaded.device.device.is_cpu() ? kFloat : kBFloat16;
  return loaded;
}

void load_values(LoadedModel& loaded, const std::optional<std::filesystem::path>& adapter, const MeshPlace& place) {
  const auto parameters = loaded.model.parameters();
  load_parameters(*loaded.folder, parameters, loaded.model.weights, loaded.dtype, place);
  if (adapter) load_adapter(*adapter, parameters, loaded.model.weights, loaded.dtype);
  for (auto* parameter : parameters) {
    if (!parameter->as_stored) parameter->value = parameter->value.to(loaded.device.device);
  }
  for (auto* parameter : lora_parameters(parameters)) parameter->value = parameter->value.to(loaded.device.device);
}

LoadedModel load_model(const std::filesystem::path& path, DeviceChoice device, std::optional<Precision> precision,
                       const BuildOptions& options, const std::optional<std::filesystem::path>& adapter) {
  auto loaded = open_model(path, device, precision, options);
  load_values(loaded, adapter);
  return loaded;
}

}  // namespace sluice
