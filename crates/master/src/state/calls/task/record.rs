//! Log records of tasks, and their recovery after a restart.

use mooncake_base::{ClientId, Moment, ObjectKey, TaskId, TenantId};

use crate::state::{
    calls::{
        answers::CallItem,
        task::{
            TaskCalls, TaskKind, TaskSource, TaskStatus,
            table::{Goal, Subject, Task},
        },
    },
    catalog::object::{NO_OBJECT, Objects},
    inventory::quota::intern_tenant,
    ledger::{
        effect::{Effect, reader::Reader, writer::Writer},
        task_record::{RecordKind, read_moment, read_texts, write_moment, write_texts},
    },
};

impl Task {
    /// Encodes the task for the log.
    pub(in crate::state) fn record(&self, objects: &Objects) -> Vec<u8> {
        let mut record = RecordKind::Task.begin();
        let out = &mut Writer(&mut record);
        write_moment(out, self.created);
        match &self.goal {
            Goal::Copy { targets } => {
                out.byte(0);
                write_texts(out, targets);
            }
            Goal::Move { source, target } => {
                out.byte(1).text(source).text(target);
            }
            // A task of a drain: only the job is logged.
            Goal::Evacuate { targets, .. } => {
                out.byte(0);
                write_texts(out, targets);
            }
        }
        let subject = &self.subject;
        out.text(objects.logged_tenant(subject.tenant)).bytes(subject.key.as_bytes());
        out.int(subject.version).int(u64::from(self.retries));
        match self.status {
            TaskStatus::Pending | TaskStatus::Processing => {
                out.byte(0);
            }
            TaskStatus::Failed | TaskStatus::Success => {
                out.byte(1 + u8::from(self.status == TaskStatus::Success));
                write_moment(out, self.updated);
                out.id(self.client.bits()).text(&self.message);
            }
        }
        CallItem::write(self.item, out);
        record
    }

    fn is_over(&self) -> bool {
        matches!(self.status, TaskStatus::Failed | TaskStatus::Success)
    }
}

impl TaskCalls<'_> {
    /// Logs the status of the task, unless it belongs to a drain.
    pub(super) fn log_task(&mut self, id: TaskId) {
        let Some(task) = self.tasks.get(id).filter(|task| task.job.is_none()) else { return };
        if self.inventory.log().is_recording() {
            let record = task.record(self.inventory.objects());
            self.inventory.record(|| Effect::Task { id: id.bits(), record: Some(&record) });
        }
    }

    /// Decodes a task; `None` if the record is damaged.
    pub(in crate::state) fn read_task(
        &mut self,
        now: Moment,
        input: &mut Reader<'_>,
    ) -> Option<Task> {
        let created = read_moment(input, now)?;
        let (kind, goal) = match input.byte()? {
            0 => (TaskKind::Copy, Goal::Copy { targets: read_texts(input)? }),
            1 => {
                let (source, target) = (input.text()?.into(), input.text()?.into());
                (TaskKind::Move, Goal::Move { source, target })
            }
            _ => return None,
        };
        let tenant = intern_tenant(self.inventory, &TenantId::new(input.text()?)).ok()?;
        let key = ObjectKey::new(input.sized()?).ok()?;
        let version = input.int()?;
        let found = self.inventory.objects().find(tenant, key.as_bytes());
        let slot = found.unwrap_or(NO_OBJECT);
        let subject = Subject { slot, version, tenant, key };
        let mut task = Task::new(created, kind, goal, subject, TaskSource::Caller(None));
        task.retries = u32::try_from(input.int()?).ok()?;
        // No attempt under the earlier master matches one of this master: versions are never
        // reused, and a task has fewer phases than versions are skipped at a restart.
        task.phase = self.inventory.next_version();
        let status = input.byte()?;
        if status > 0 {
            task.status = if status == 2 { TaskStatus::Success } else { TaskStatus::Failed };
            task.updated = read_moment(input, now)?;
            task.client = ClientId::from_bits(input.id()?);
            input.text()?.clone_into(&mut task.message);
        }
        task.item = CallItem::read(input)?;
        Some(task)
    }

    /// Resumes tasks: unfinished tasks wait for a holder of their object, or fail if the object no
    /// longer exists. Returns how many wait.
    pub(in crate::state) fn restore_tasks(
        &mut self,
        now: Moment,
        mut tasks: Vec<(TaskId, Task)>,
    ) -> u64 {
        tasks.sort_by_key(|(id, task)| (task.is_over(), task.updated, task.created, *id));
        for (id, task) in tasks {
            let is_over = task.is_over();
            self.tasks.insert_with_id(id, task);
            if is_over {
                self.forget_finished(id);
            } else {
                self.queue_task(now, id);
            }
        }
        self.tasks.pending() as u64
    }
}
