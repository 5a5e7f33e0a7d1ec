//! The progress that a TrainJob shows, taken by a stand-in for Kubeflow's controller.

use crate::{
    serve::{CERTIFICATES, python},
    support::{cox, root},
};

#[test]
fn a_trainjob_is_told_its_progress_and_a_controller_that_refuses_or_is_gone_is_a_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = cox(&[]).get_program().display().to_string();
    let certificates = root().join(CERTIFICATES).display().to_string();
    let arguments = [program.as_str(), &certificates, &dir.path().display().to_string()];
    python("kubeflow_trainer_api", "check_trainjob.py", &arguments);
}
