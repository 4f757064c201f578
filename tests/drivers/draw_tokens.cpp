// SPDX-License-Identifier: Apache-2.0
// Draws tokens from given logits, for test_sampling.py. Standard input: one JSON object a line, with `logits`, `seen`,
// `randoms` and the sampling parameters by name. Standard output: for each one JSON line with `ids` and `logprobs`.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "sluice/sample/sampler.h"

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const auto request = nlohmann::json::parse(line);
    const auto logits = request.at("logits").get<std::vector<float>>();
    const auto seen = request.at("seen").get<std::vector<sluice::TokenId>>();
    const sluice::SamplingParameters parameters{.temperature = request.value("temperature", 1.0),
                                                .top_k = request.value("top_k", std::int64_t{0}),
                                                .top_p = request.value("top_p", 1.0),
                                                .min_p = request.value("min_p", 0.0),
                                                .repetition_penalty = request.value("repetition_penalty", 1.0)};
    sluice::Sampler sampler(static_cast<std::int64_t>(logits.size()));
    nlohmann::json ids = nlohmann::json::array(), logprobs = nlohmann::json::array();
    for (const double random : request.at("randoms")) {
      const auto drawn = sampler.draw(logits, parameters, seen, random);
      ids.push_back(drawn.id);
      logprobs.push_back(drawn.logprob);
    }
    std::cout << nlohmann::json{{"ids", ids}, {"logprobs", logprobs}}.dump() << "\n";
  }
}
