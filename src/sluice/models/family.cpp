// SPDX-License-Identifier: Apache-2.0
#include "sluice/models/family.h"

#include <algorithm>

#include "sluice/core/error.h"

namespace sluice {
namespace {

std::vector<Family>& registry() {
  static std::vector<Family> list;
  return list;
}

}  // namespace

const std::vector<Family>& families() { return registry(); }

RegisterFamily::RegisterFamily(Family family) { registry().push_back(std::move(family)); }

const Family& family_of(const nlohmann::json& config, const std::string& where) {
  const auto type = config.is_object() ? config.value("model_type", nlohmann::json()) : nlohmann::json();
  std::string known;
  for (const auto& family : registry()) {
    for (const auto& name : family.model_types) {
      if (type == name) return family;
      known += (known.empty() ? "" : ", ") + name;
    }
  }
  fail_data("{}.model_type: expected one of {}, found {}", where, known, type.is_null() ? "nothing" : type.dump());
}

Model build_model(const nlohmann::json& config, const std::string& where, const BuildOptions& options) {
  return family_of(config, where).build(config, where, options);
}

std::vector<Parameter*> Model::parameters() const {
  auto list = decoder->parameters();
  if (mtp != nullptr) {
    for (auto* parameter : mtp->parameters()) list.push_back(parameter);
  }
  return list;
}

}  // namespace sluice
