//! A program of one's own: all tasks of `cox` with two families of models more, and one task more.
//!
//! The task is of the smallest size: a regression on the rows of a parquet table, learned by a network of two
//! layers. The families are the smallest that see images and read text.
//!
//! ```text
//! settings    its keys in run files, and what each means for the identity of a run
//! table       the data: rows of numbers, which of them train, and their fingerprint
//! batch       a row, and rows side by side
//! network     forward, backward, evaluation, and the file that it leaves
//! memory      what a rank of a run will hold, from sizes alone
//! families    what the other tasks train besides the families of the repository
//! ```
//!
//! `docs/develop/add-a-task.md` walks through the first five, `docs/develop/add-a-model.md` through a family.
//! No crate of the repository knows this one: [`tasks`] is all that ties them together.

mod batch;
mod families;
mod memory;
mod network;
mod settings;
mod table;

use std::{path::Path, sync::Arc};

use burn::backend::Flex;
use coxswain_data::DataError;
use coxswain_nn::kernels::Tape;
use coxswain_proto::{config::TaskSchema, run_spec::RunSpec};
use coxswain_task::{Assembly, Samples, Task, TaskError, TaskOn, memory::Subject};
use coxswain_worker::device::Tasks;

pub use self::settings::Settings;
use self::{memory::Sizes, network::Regression, table::Table};

/// The task `regression`.
#[derive(Clone, Copy, Debug)]
pub struct TableRegression;

impl Task for TableRegression {
    fn schema(&self) -> TaskSchema {
        TaskSchema::of::<Settings>()
    }

    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(Table::open(spec)?))
    }

    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(Sizes::read(spec).map_err(TaskError::bad_input)?))
    }

    fn write_sample(&self, spec: &RunSpec, index: u64, out: &Path) -> Result<(), DataError> {
        Table::open(spec)?.write(index, out)
    }
}

impl<B: Tape<Base = B>> TaskOn<B> for TableRegression {
    fn load(
        &self,
        spec: &RunSpec,
        _samples: &dyn Samples,
        device: &B::Device,
    ) -> Result<Assembly<B>, TaskError> {
        let (network, layout) = Regression::<B>::new(spec, device);
        Ok(Assembly { objective: Box::new(network), layout, initial: Vec::new() })
    }
}

/// All tasks of `cox`, with the families of this program, and this one.
pub fn tasks() -> Tasks {
    let mut cpu = coxswain_tasks::on_cpu_with(families::shelves());
    cpu.push(&TableRegression as &'static dyn TaskOn<Flex>);
    #[cfg(not(feature = "cuda"))]
    let accelerator = coxswain::standard().accelerator;
    #[cfg(feature = "cuda")]
    let accelerator = &coxswain_cuda::Nvidia { tasks: on_gpus };
    Tasks { cpu: cpu.leak(), accelerator }
}

#[cfg(feature = "cuda")]
fn on_gpus() -> Vec<&'static dyn TaskOn<coxswain_cuda::Cuda>> {
    let mut tasks = coxswain_tasks::on(families::shelves());
    tasks.push(&TableRegression);
    tasks
}
