// SPDX-License-Identifier: Apache-2.0
// A family is a declaration: from a config.json to the parts of a decoder, and how its checkpoints name things. Each
// family's folder registers one; nothing else lists families.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sluice/formats/weight_map.h"
#include "sluice/models/decoder.h"
#include "sluice/models/multi_token_prediction.h"

namespace sluice {

// A decoder and how its checkpoints name, split and leave out tensors.
struct Model {
  std::unique_ptr<Decoder> decoder;
  WeightRules weights;
  double router_aux_loss_coef = 0;                 // of the load-balancing loss, as its config.json asks
  std::unique_ptr<MultiTokenPrediction> mtp = {};  // where BuildOptions ask for it

  std::vector<Parameter*> parameters() const;  // of all of its modules
};

struct BuildOptions {
  bool mtp = false;  // with the multi-token prediction block; otherwise its tensors are set aside
};

struct Family {
  std::string name;                            // as its folder
  std::vector<std::string> model_types;        // config.json's model_type, nested or flat
  std::map<std::string, std::string> presets;  // name to config.json, for `sluice init`

  // `config` as in config.json; `where` names it in messages. Data error for a value that is not supported.
  std::function<Model(const nlohmann::json& config, const std::string& where, const BuildOptions& options)> build;
};

// The family of a config.json. Data error that lists the known ones for another model_type.
const Family& family_of(const nlohmann::json& config, const std::string& where);

// What the family of a config.json builds from it.
Model build_model(const nlohmann::json& config, const std::string& where, const BuildOptions& options = {});

const std::vector<Family>& families();

// Makes a family known; one static object a family's folder.
struct RegisterFamily {
  explicit RegisterFamily(Family family);
};

}  // namespace sluice
