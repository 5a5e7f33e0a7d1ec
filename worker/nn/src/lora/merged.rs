//! Weights with what their adapters have learned.

use super::plan::LoraPlan;
use crate::params::TrainableLayout;

/// All values, those of adapted weights `W + s B A`; `keys` names the two matrices of a module. Without
/// magnitudes.
///
/// Panics if the layout was not made with this plan, or `values` not with this layout, constants included.
pub fn merged(
    plan: &LoraPlan,
    keys: fn(&str) -> [String; 2],
    layout: &TrainableLayout,
    values: &[f32],
) -> Vec<f32> {
    let mut merged = values.to_vec();
    let find = |name: &str| layout.whole().find(|param| param.name == name);
    for (module, spec) in plan.adapters() {
        let [a, b] = keys(module).map(|name| find(&name).expect("registered with this plan"));
        let weight = find(&format!("{module}.weight")).expect("an adapter is of a linear");
        let (a_ri, b_or) = (&values[a.range()], &values[b.range()]);
        let inputs = weight.shape[1];
        let rows = merged[weight.range()].chunks_exact_mut(inputs).zip(b_or.chunks_exact(spec.rank));
        for (weight_i, b_r) in rows {
            let mut update_i = vec![0.0f32; inputs];
            for (b, a_i) in b_r.iter().zip(a_ri.chunks_exact(inputs)) {
                update_i.iter_mut().zip(a_i).for_each(|(sum, a)| *sum += b * a);
            }
            weight_i.iter_mut().zip(update_i).for_each(|(w, update)| *w += spec.scale as f32 * update);
        }
    }
    merged
}
