//! The settlement of unconfirmed puts between two heartbeats.

use mooncake_store_client::protocol::UnconfirmedPut;

use crate::{
    actor::client::{Input, Op},
    actor::repeated_call::{Progress, RepeatedCall},
    call::{Call, WrittenPut, key_number},
    plan::Bug,
    simulator::Simulator,
};

/// The most puts that one operation settles.
const PUTS_MAX: usize = 4;

/// Revokes unconfirmed puts, one after the other.
#[derive(Debug)]
pub(crate) struct Settle {
    /// The last one is being revoked.
    puts: Vec<UnconfirmedPut>,
    call: Option<RepeatedCall>,
}

impl Simulator {
    pub(crate) fn start_settling(&mut self, process: u64) -> Result<(), String> {
        let Some(found) = self.processes.get(&process) else { return Ok(()) };
        let puts = found.own_puts.some_unconfirmed(PUTS_MAX);
        let number = self.next_number();
        self.start_op((process, number), Op::Settle(Settle { puts, call: None }), false)
    }

    /// Sends the call that settles an unconfirmed put.
    pub(crate) fn send_settling(
        &mut self,
        caller: (u64, u64),
        put: &UnconfirmedPut,
    ) -> RepeatedCall {
        let failed = put.failed_replicas.to_vec();
        let puts = vec![WrittenPut {
            failed,
            ..WrittenPut::of(key_number(put.key.as_bytes()), put.version)
        }];
        let call = if self.plan.has(Bug::EndsLatePuts) {
            Call::PutEnd { puts, has_keys: false }
        } else {
            Call::PutRevoke { puts }
        };
        RepeatedCall::send(self, caller, call)
    }

    /// Records that the master does not hold a put any more.
    pub(crate) fn confirm(&mut self, process: u64, put: &UnconfirmedPut) {
        if let Some(found) = self.processes.get_mut(&process) {
            found.own_puts.confirm(put);
        }
    }
}

impl Settle {
    pub(crate) fn step(
        mut self,
        simulator: &mut Simulator,
        caller: (u64, u64),
        input: Input,
    ) -> Option<Self> {
        if let Some(call) = &mut self.call {
            match call.step(simulator, caller, input) {
                Progress::Waiting => return Some(self),
                // Also a refusal says that the master does not hold it.
                Progress::Answered(_) => simulator.confirm(caller.0, &self.puts.pop()?),
                Progress::GivenUp => return None,
            }
        }
        self.call = Some(simulator.send_settling(caller, self.puts.last()?));
        Some(self)
    }
}
