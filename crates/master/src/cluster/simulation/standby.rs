//! A member that follows: what the threads of `following` do, one message at a time.

use std::time::Duration;

use mooncake_base::{Error, Moment};
use mooncake_proto::standby::{Attach, Attached, Confirm, FromLeader, FromStandby, Start};

use super::{
    Simulation,
    bugs::Bug,
    node::{Part, Process, leader_in},
    wire::Message,
};
use crate::{
    cluster::{
        following::{check_view, may_give_up_log},
        lease_notes,
        member::Membership,
    },
    journal::{IncomingSnapshot, LogSync, StandbyLog, level::RecordLevel},
};

/// Time without a message after which a connection is given up.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(3);

/// A member that follows.
#[derive(Debug)]
pub(super) struct Standby {
    pub(super) log: StandbyLog,
    pub(super) membership: Membership,
    link: Option<Link>,
    retry_at: Moment,
}

/// The connection to the leader.
#[derive(Debug)]
struct Link {
    connection: u64,
    heard: Moment,
    attached: Option<Attached>,
    incoming: Option<IncomingSnapshot>,
}

impl Standby {
    pub(super) fn new(log: StandbyLog, membership: Membership) -> Self {
        Self { log, membership, link: None, retry_at: Moment::default() }
    }

    fn attach(&self, index: usize) -> Attach {
        let (timeline_id, next_frame) = self.log.place();
        Attach {
            member: self.membership.member().to_owned(),
            address: index.to_string(),
            version: String::new(),
            timeline_id: timeline_id.to_vec(),
            next_frame,
            views: self.membership.views(),
            level: RecordLevel::PRESENT.0,
        }
    }

    fn maintain(&mut self, syncs: bool, compacts: bool) -> Result<(), Error> {
        if syncs && let Some(point) = self.log.sync_point() {
            point.sync()?;
            self.log.end_sync(&point);
        }
        let receives_files = self.link.as_ref().is_some_and(|link| link.incoming.is_some());
        if compacts && !receives_files && !self.log.is_empty() {
            let compaction = self.log.compact()?;
            self.log.end_compaction(compaction.run()?);
        }
        Ok(())
    }
}

impl Simulation {
    /// Connects to the leader, and keeps the files in order.
    pub(super) fn step_standby(
        &mut self,
        index: usize,
        process: &mut Process,
    ) -> Result<(), String> {
        let is_stale = self.chance(4);
        let leader = leader_in(if is_stale { &process.known_before } else { &process.known });
        let Part::Following(standby) = &mut process.part else { return Ok(()) };
        let failed = |error: Error| format!("member {index}: {error}");
        let is_open = standby.link.as_ref().is_some_and(|link| {
            self.wire.connections.contains_key(&link.connection)
                && !(link.heard + SILENCE_MAX).has_passed(self.now)
        });
        if let Some(link) = standby.link.take_if(|_| !is_open) {
            self.wire.connections.remove(&link.connection);
            standby.retry_at = self.now + self.milliseconds(200);
        }
        if standby.link.is_none() && standby.retry_at.has_passed(self.now) {
            standby.log.mend().map_err(failed)?;
            let can_reach = |leader: &usize| {
                *leader != index
                    && self.nodes[*leader].process.is_some()
                    && self.nodes[index].cut_until[*leader].has_passed(self.now)
            };
            if let Some(leader) = leader.filter(can_reach) {
                let connection = self.connect(index, leader);
                let (heard, attach) = (self.now, Some(standby.attach(index)));
                standby.link = Some(Link { connection, heard, attached: None, incoming: None });
                let message = FromStandby { attach, confirm: None };
                self.send(Message::ToLeader { connection, message });
            }
        }
        let syncs = self.syncs();
        let compacts = self.chance(300);
        standby.maintain(syncs, compacts).map_err(failed)
    }

    /// Takes a message of the leader. An error ends the connection.
    pub(super) fn receive_from_leader(
        &mut self,
        index: usize,
        process: &mut Process,
        connection: u64,
        message: FromLeader,
    ) {
        let is_own = matches!(&process.part, Part::Following(standby)
            if standby.link.as_ref().is_some_and(|link| link.connection == connection));
        if !is_own || self.follow(index, process, connection, message).is_err() {
            self.wire.connections.remove(&connection);
        }
    }

    fn follow(
        &mut self,
        index: usize,
        process: &mut Process,
        connection: u64,
        message: FromLeader,
    ) -> Result<(), Error> {
        let (now, local) = (self.now, self.nodes[index].local(self.now));
        if let FromLeader { attached: Some(attached), .. } = message {
            if let Part::Following(standby) = &process.part {
                let heard = process.election.view_max();
                let checked = check_view(&attached, heard, &standby.membership.views());
                self.outcome.earlier_leaders += u64::from(checked.is_err());
                if !self.plan.has(Bug::FollowsEarlierView) {
                    checked?;
                }
            }
            return self.begin(process, attached, local);
        }
        let Part::Following(standby) = &mut process.part else { return Ok(()) };
        let Some(link) = &mut standby.link else { return Ok(()) };
        link.heard = now;
        let Some(attached) = link.attached.clone() else { return Err(Error::internal("order")) };
        let confirmed = match message {
            FromLeader { part: Some(part), .. } => {
                let Some(mut incoming) = link.incoming.take() else {
                    return Err(Error::internal("no snapshot is awaited"));
                };
                incoming.append(&part.bytes)?;
                if !part.is_last {
                    link.incoming = Some(incoming);
                    return Ok(());
                }
                standby.log.adopt_snapshot(incoming)?;
                standby.membership.follow(&attached.views)?;
                self.outcome.snapshots += 1;
                Confirm { position: 0, next_frame: standby.log.place().1 }
            }
            FromLeader { frames: Some(frames), .. } => {
                standby.log.receive(&frames.bytes)?;
                if let Some(leases) = frames.leases {
                    standby.log.receive_leases(local, &lease_notes::from_message(leases));
                }
                if frames.is_rest_logged {
                    standby.log.set_rest_logged();
                }
                standby.log.set_level(RecordLevel(frames.level))?;
                if self.plan.sync == LogSync::Always
                    && let Some(point) = standby.log.sync_point()
                {
                    point.sync()?;
                    standby.log.end_sync(&point);
                }
                let next_frame = standby.log.place().1;
                if next_frame >= attached.end_frame {
                    let is_new = standby.membership.complete()?;
                    self.history.record_whole(standby.membership.member());
                    if is_new {
                        process.set_complete(true, self.plan.bug, local);
                    }
                }
                Confirm { position: frames.position, next_frame }
            }
            _ => return Err(Error::internal("a refusal")),
        };
        let message = FromStandby { attach: None, confirm: Some(confirmed) };
        self.send(Message::ToLeader { connection, message });
        Ok(())
    }

    /// Brings the log to where the leader begins to send frames.
    fn begin(
        &mut self,
        process: &mut Process,
        attached: Attached,
        local: Moment,
    ) -> Result<(), Error> {
        let bug = self.plan.bug;
        let timeline_id = attached.timeline_id[..].try_into().map_err(|_| Error::internal("id"))?;
        if attached.start() != Start::Place {
            let Part::Following(standby) = &mut process.part else { return Ok(()) };
            let is_empty = standby.log.is_empty();
            standby.membership.give_up_log(is_empty)?;
            process.set_complete(false, bug, local);
            may_give_up_log(process.election.role(local))?;
            self.outcome.replaced_logs += u64::from(!is_empty);
            self.history.record_damage(&process.member);
        }
        let Part::Following(standby) = &mut process.part else { return Ok(()) };
        let Some(link) = &mut standby.link else { return Ok(()) };
        link.heard = self.now;
        standby.log.forget_leases();
        match attached.start() {
            Start::Place => standby.membership.follow(&attached.views)?,
            Start::FirstFrame => {
                standby.log.begin_anew(timeline_id)?;
                standby.membership.follow(&attached.views)?;
            }
            Start::Snapshot => {
                let incoming = standby.log.receive_snapshot(timeline_id, attached.snapshot)?;
                link.incoming = Some(incoming);
            }
        }
        link.attached = Some(attached);
        Ok(())
    }
}
