//! What this program can train, and on what. Set once, when the program starts.

use std::sync::OnceLock;

use coxswain_proto::{config, run_spec::DeviceChoice};
use coxswain_worker::device::{self, Accelerator, Device, Tasks};

use crate::exit::CliError;

static INSTALLED: OnceLock<(Tasks, config::Tasks)> = OnceLock::new();

/// All tasks of this repository.
pub fn standard() -> Tasks {
    Tasks { cpu: coxswain_tasks::on_cpu().leak(), accelerator: nvidia() }
}

/// NVIDIA's GPUs, or the null object in a build without them.
pub fn nvidia() -> &'static dyn Accelerator {
    #[cfg(feature = "cuda")]
    return &coxswain_cuda::NVIDIA;
    #[cfg(not(feature = "cuda"))]
    return &coxswain_worker::device::NoAccelerator { driver: has_driver };
}

/// Whether the driver could be loaded here: then this is the wrong build for the machine, and choosing a
/// device says so.
#[cfg(not(feature = "cuda"))]
fn has_driver() -> bool {
    // SAFETY: opening the driver runs its initialisers, as every program that uses a GPU does; no symbol is
    // called.
    unsafe { libloading::Library::new("libcuda.so.1") }.is_ok()
}

/// Makes these the program's tasks; the first call counts.
pub fn install(tasks: Tasks) {
    let schemas: Vec<_> = tasks.cpu.iter().map(|task| task.schema()).collect();
    let _ = INSTALLED.set((tasks, config::Tasks(schemas.leak())));
}

/// The program's tasks; all of this repository in a test, where nothing has been installed.
pub fn tasks() -> Tasks {
    installed().0
}

/// Keys in run files.
pub fn schemas() -> config::Tasks {
    installed().1
}

fn installed() -> (Tasks, config::Tasks) {
    if INSTALLED.get().is_none() {
        install(standard());
    }
    *INSTALLED.get().expect("installed above")
}

/// The device that is meant here by this choice.
pub fn chosen_device(wanted: DeviceChoice) -> Result<Device, CliError> {
    let chosen = device::choose(wanted, 0, accelerator());
    chosen.map_err(|missing| CliError::usage(format!("device {wanted}: {missing}")))
}

/// What this build can do with GPUs.
pub fn accelerator() -> &'static dyn Accelerator {
    tasks().accelerator
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use coxswain_proto::config::bounds;
    use serde_json::Value;

    use super::*;

    /// The file of the bounds of the engine, and of the task whose keys are in the reference.
    const FILE: &str = "docs/reference/run-file.bounds.json";

    #[test]
    fn the_bounds_in_the_reference_are_those_that_are_held() {
        let schema = schemas().named("vla_flow").expect("a task of this repository");
        let mut table = bounds::table(bounds::ENGINE);
        table.append(&mut bounds::table(schema.bounds));
        let made = format!("{:#}\n", Value::Object(table));
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(FILE);
        if std::env::var_os("COX_WRITE_DOCS").is_some() {
            fs::write(&path, &made).expect("docs can be written");
        }
        let there = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            there == made,
            "{FILE}: `COX_WRITE_DOCS=1 cargo test -p coxswain --lib bounds_in_the` writes it"
        );
    }
}
