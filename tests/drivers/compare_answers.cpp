// SPDX-License-Identifier: Apache-2.0
// For tests/test_rl_answers.py: reads pairs of answers, a JSON list a line, and prints whether MATH's rule finds them
// equal.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "sluice/rl/answers.h"

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const auto pair = nlohmann::json::parse(line);
    std::cout << (sluice::equal_math(pair.at(0).get<std::string>(), pair.at(1).get<std::string>()) ? "true" : "false")
              << "\n";
  }
}
