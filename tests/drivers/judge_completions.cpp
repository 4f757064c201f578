// SPDX-License-Identifier: Apache-2.0
// For tests/test_reasoning_gym.py: reads requests, a JSON object a line, and prints the reward of each, or null.
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "sluice/core/error.h"
#include "sluice/rl/judge.h"

int main() {
  std::vector<nlohmann::ordered_json> requests;
  for (std::string line; std::getline(std::cin, line);) requests.push_back(nlohmann::ordered_json::parse(line));
  try {
    sluice::Judge judge(sluice::reasoning_gym_judge(), {.retries = 0});
    for (const auto& reward : judge.judge(requests)) {
      std::cout << (reward ? nlohmann::json(*reward) : nlohmann::json()) << "\n";
    }
  } catch (const sluice::Error& error) {
    std::cerr << error.what() << "\n";
    return static_cast<int>(error.code());
  }
}
