//! The choice of the objects that an operation puts, and of their options.

use std::time::Duration;

use crate::{
    call::{NewPut, PutTerms},
    simulator::Simulator,
};

/// The most puts of one operation.
const BATCH_MAX: u64 = 6;

/// Returns random puts of keys of one tenant, all of which replace or none. Most operations are one
/// put.
pub(super) fn random_puts(simulator: &mut Simulator) -> Vec<NewPut> {
    let (keys, words) = (simulator.plan.keys, simulator.plan.object_words);
    let mut chosen = vec![simulator.random.below(keys)];
    if simulator.random.happens(simulator.plan.batches) {
        let tenant = simulator.host.tenant_of(chosen[0]);
        for _ in 1..simulator.random.between(2, BATCH_MAX) {
            let key = simulator.random.below(keys);
            if !chosen.contains(&key) && simulator.host.tenant_of(key) == tenant {
                chosen.push(key);
            }
        }
    }
    let is_replacing = simulator.random.happens(600);
    let mut puts = Vec::new();
    for key in chosen {
        let length = simulator.random.between(1, words);
        puts.push(NewPut { key, length, terms: random_terms(simulator, key, is_replacing) });
    }
    puts
}

/// Returns random options of a put.
fn random_terms(simulator: &mut Simulator, key: u64, is_replacing: bool) -> PutTerms {
    let plan = &simulator.plan;
    let (optional, groups) = (plan.optional, plan.groups);
    let random = &mut simulator.random;
    let replicas = if random.happens(300) { 2 } else { 1 };
    let ttl = random.happens(optional).then(|| Duration::from_millis(200 + random.below(8000)));
    let (has_tag, has_checksum) = (random.happens(optional), random.happens(optional * 2));
    let is_soft_pinned = random.happens(optional / 2);
    let group = (groups > 0 && random.happens(300)).then(|| key % groups);
    let is_conditional = is_replacing && random.happens(optional);
    let current = simulator.history.current_version(key);
    let if_version = if is_conditional { current } else { None };
    PutTerms {
        replicas,
        is_replacing,
        if_version,
        ttl,
        group,
        has_tag,
        has_checksum,
        is_soft_pinned,
    }
}
