use libtest_mimic::Trial;
use phalanx_testkit::Scenario;
pub const SCENARIOS: &[Scenario] = &[];
pub fn trials() -> Vec<Trial> {
    Vec::new()
}
