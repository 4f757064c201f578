// SPDX-License-Identifier: Apache-2.0
// A command as several processes: they meet, agree that they run the same, and end together.
#pragma once

#include <functional>
#include <string>

#include "sluice/core/error.h"
#include "sluice/parallel/launch.h"
#include "sluice/parallel/mesh.h"
#include "sluice/parallel/world.h"
#include "sluice/train/options.h"

namespace sluice {

// How this process was started. All but the first are silent from here on.
Launch join_launch();

// Meets the other processes, on `device` each, and runs `command` on their mesh. Usage error, before anything else is
// done, where their program or settings differ (`resolved_toml`, see config/app.h), or no such mesh can be made of
// them. Where one fails, the others end with an error that refers to it.
ExitCode run_on_mesh(const Launch& launch, const ParallelOptions& options, at::Device device,
                     const std::string& resolved_toml, const std::function<ExitCode(const Mesh& mesh)>& command);

// The sizes of a mesh of so many ranks. Usage error if tp x cp does not divide them.
MeshSizes mesh_sizes(const ParallelOptions& options, std::int64_t ranks);

// Usage error where this process was started among others, for a command that runs as one.
void only_one_process(const std::string& command);

}  // namespace sluice
