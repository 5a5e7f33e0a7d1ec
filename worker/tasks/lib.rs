//! What Coxswain trains, a folder each; and what they have in common: in `pretrained` of the files they
//! leave, in `found` of data that a user names without saying what it is, in `frozen` of the weights that
//! kept features depend on, in `tokens` of losses over tokens, in `starter` of run files to begin with, in
//! `holdout`, `savings`, `sample_file` and `settings` what their names say.

mod found;
mod frozen;
mod holdout;
#[cfg(test)]
mod packing;
mod pretrained;
mod sample_file;
mod savings;
pub mod separation;
pub mod seq2seq;
mod settings;
pub mod sft;
mod starter;
mod tokens;
pub mod trajectory;
pub mod vla_flow;

use coxswain_proto::config::Tasks;

/// The keys of all tasks in run files: a line each.
pub const TASKS: Tasks = Tasks(&[
    vla_flow::config::SCHEMA,
    sft::config::SCHEMA,
    seq2seq::config::SCHEMA,
    trajectory::config::SCHEMA,
    separation::config::SCHEMA,
]);

use burn::backend::Flex;
use coxswain_models::Shelves;
use coxswain_nn::kernels::Tape;
use coxswain_task::TaskOn;

/// All tasks, on one kind of device and with these models: a line each.
pub fn on<B: Tape<Base = B>>(models: Shelves<B>) -> Vec<&'static dyn TaskOn<B>> {
    vec![
        leaked(vla_flow::VlaFlow { models }),
        leaked(sft::Sft { models }),
        leaked(seq2seq::Seq2Seq { models }),
        leaked(trajectory::Trajectory { models }),
        &separation::Separation,
    ]
}

/// A task lives as long as its program.
pub fn leaked<T>(task: T) -> &'static T {
    Box::leak(Box::new(task))
}

/// All tasks, on the CPU and with the models of this repository. What they compute is compiled here, once for
/// every program.
pub fn on_cpu() -> Vec<&'static dyn TaskOn<Flex>> {
    on_cpu_with(Shelves::default())
}

/// All tasks on the CPU with the models of another program.
pub fn on_cpu_with(models: Shelves<Flex>) -> Vec<&'static dyn TaskOn<Flex>> {
    on(models)
}
