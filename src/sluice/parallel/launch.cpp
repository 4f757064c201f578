// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/launch.h"

#include <charconv>
#include <cstdlib>

#include "sluice/core/error.h"

namespace sluice {
namespace {

// What one starter calls its numbers, and what tells that it is there.
struct Starter {
  const char *name, *rank, *size, *local_rank;
};

// SLURM_STEP_NUM_TASKS and not SLURM_NTASKS: the latter is there in a batch script too, which is one process.
constexpr Starter kStarters[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"}};

std::int64_t number(const std::string& name, const std::string& text, std::int64_t most) {
  std::int64_t value = 0;
  const auto* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < 0 || value > most) {
    fail_usage("environment: {} must be a number from 0 to {}; it is \"{}\".", name, most, text);
  }
  return value;
}

std::string required(const EnvironmentVariables& environment, const Starter& starter, const std::string& name) {
  if (auto value = environment(name)) return *value;
  fail_usage("environment: {} is not set, and {} is: {} sets both.\n  Start through it, or unset {} to run alone.",
             name, name == starter.size ? starter.rank : starter.size, starter.name, starter.rank);
}

}  // namespace

std::string first_host(const std::string& node_list) {
  const auto bracket = node_list.find('['), comma = node_list.find(',');
  if (bracket == std::string::npos || comma < bracket) return node_list.substr(0, comma);
  return node_list.substr(0, bracket) +
         node_list.substr(bracket + 1, node_list.find_first_of(",-]", bracket) - bracket - 1);
}

Launch read_launch(const EnvironmentVariables& environment) {
  for (const auto& starter : kStarters) {
    // The rank alone may be there without its starter: srun's are left in a batch script.
    const bool is_here = starter.name == std::string("torchrun")
                             ? environment(starter.rank) || environment(starter.size)
                             : environment(starter.size).has_value();
    if (!is_here) continue;
    constexpr std::int64_t kMost = 1 << 20;
    Launch launch{.starter = starter.name};
    launch.size = number(starter.size, required(environment, starter, starter.size), kMost);
    launch.rank = number(starter.rank, required(environment, starter, starter.rank), kMost);
    if (launch.rank >= launch.size) {
      fail_usage("environment: {} is {}, and {} is {}: ranks count from 0 to one less than the size.", starter.rank,
                 launch.rank, starter.size, launch.size);
    }
    if (launch.size == 1) return {};
    launch.local_rank = number(starter.local_rank, environment(starter.local_rank).value_or("0"), launch.size - 1);
    if (const auto port = environment("MASTER_PORT")) {
      launch.port = static_cast<std::uint16_t>(number("MASTER_PORT", *port, 65535));
    }
    launch.has_store = environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
    const auto nodes = environment("SLURM_JOB_NODELIST");
    if (const auto address = environment("MASTER_ADDR")) {
      launch.address = *address;
    } else if (nodes) {
      launch.address = first_host(*nodes);
    } else if (environment("OMPI_COMM_WORLD_LOCAL_SIZE") == environment(starter.size)) {
      launch.address = "127.0.0.1";  // all on this machine
    } else {
      fail_usage("environment: MASTER_ADDR is not set: the {} processes need the address of rank 0's machine to meet.",
                 launch.size);
    }
    return launch;
  }
  return {};
}

Launch read_launch() {
  return read_launch([](const std::string& name) {
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  });
}

}  // namespace sluice
