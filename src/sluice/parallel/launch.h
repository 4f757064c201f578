// SPDX-License-Identifier: Apache-2.0
// How this process was started among others: by torchrun, mpirun or srun, each of which speaks through environment
// variables, or alone.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace sluice {

struct Launch {
  std::int64_t rank = 0, size = 1;
  std::int64_t local_rank = 0;  // among the processes of this machine: the number of its GPU
  std::string address = {};     // of the machine of rank 0, where the processes meet
  std::uint16_t port = 29500;
  bool has_store = false;    // the starter itself keeps the store where the processes meet
  std::string starter = {};  // "torchrun", "Open MPI", "SLURM"; empty: alone
};

// The value of an environment variable, or none.
using EnvironmentVariables = std::function<std::optional<std::string>(const std::string& name)>;

// torchrun's variables before Open MPI's before srun's: a torchrun that srun started sees both. MASTER_ADDR and
// MASTER_PORT are obeyed under every starter. A usage error where variables are missing, are no numbers, or disagree.
Launch read_launch(const EnvironmentVariables& environment);
Launch read_launch();  // of this process's environment

// The first machine of a SLURM node list: "node003" of "node[003-010,12],big1".
std::string first_host(const std::string& node_list);

}  // namespace sluice
