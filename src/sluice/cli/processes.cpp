// SPDX-License-Identifier: Apache-2.0
#include "sluice/cli/processes.h"

#include <chrono>
#include <sstream>

#include "sluice/config/app.h"
#include "sluice/core/log.h"

namespace sluice {
namespace {

using Facts = std::vector<std::pair<std::string, std::string>>;

// The program, and each line of the settings.
Facts facts_of(const std::string& resolved_toml) {
  Facts facts{{"program", version()}};
  std::istringstream lines(resolved_toml);
  std::string section;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("[")) section = line.substr(1, line.find(']') - 1) + ".";
    const auto equals = line.find(" = ");
    if (line.starts_with("#") || equals == std::string::npos) continue;
    facts.emplace_back(section + line.substr(0, equals), line.substr(equals + 3));
  }
  return facts;
}

}  // namespace

MeshSizes mesh_sizes(const ParallelOptions& options, std::int64_t ranks) {
  const auto share = options.tp * options.cp;
  if (ranks % share != 0) {
    fail_usage(
        "parallel.tp = {} and parallel.cp = {} need a multiple of {} processes, and {} run.\n"
        "  Start more with torchrun, mpirun or srun, or lower one of them.",
        options.tp, options.cp, share, ranks);
  }
  return {.dp = ranks / share, .cp = options.cp, .tp = options.tp, .ep = options.ep};
}

Launch join_launch() {
  auto launch = read_launch();
  if (launch.rank > 0) set_log_level(LogLevel::kNothing);
  return launch;
}

ExitCode run_on_mesh(const Launch& launch, const ParallelOptions& options, at::Device device,
                     const std::string& resolved_toml, const std::function<ExitCode(const Mesh& mesh)>& command) {
  const auto timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(options.timeout));
  const World world(launch, timeout, device);
  try {
    world.agree(facts_of(resolved_toml));
    const Mesh mesh(world, mesh_sizes(options, world.size()));
    const auto& sizes = mesh.sizes();
    if (world.size() > 1) {
      log_info("{} processes by {}: {} data x {} context x {} tensor ranks, experts over {}", world.size(),
               launch.starter, sizes.dp, sizes.cp, sizes.tp, sizes.ep);
    }
    return command(mesh);
  } catch (const std::exception& error) {
    world.note_failure(error.what());
    throw;
  }
}

void only_one_process(const std::string& command) {
  const auto launch = read_launch();
  if (launch.size == 1) return;
  fail_usage(
      "{} runs as one process, and {} were started by {}.\n  Of the commands, sft shares its work among processes.",
      command, launch.size, launch.starter);
}

}  // namespace sluice
