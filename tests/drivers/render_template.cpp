// SPDX-License-Identifier: Apache-2.0
// Renders many templates in one process, for test_chat_template.py. Standard input: one JSON object a line, with
// `template` and `variables`. Standard output: for each one JSON line with `text`, or with `error`.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "sluice/core/error.h"
#include "sluice/data/jinja/template.h"

namespace {

nlohmann::json answer(const nlohmann::ordered_json& request) {
  try {
    const sluice::jinja::Template chat_template(request.at("template").get<std::string>(), "template");
    const auto variables = sluice::jinja::from_json(request.at("variables"));
    return {{"text", chat_template.render(*variables.dict()).text.str()}};
  } catch (const std::exception& error) {
    return {{"error", error.what()}};
  }
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << answer(nlohmann::ordered_json::parse(line)).dump() << "\n";
  }
}
