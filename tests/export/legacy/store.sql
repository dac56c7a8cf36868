BEGIN TRANSACTION;
CREATE TABLE agents (
	"key" INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	owner TEXT NOT NULL, 
	agent_id TEXT NOT NULL, 
	dir TEXT NOT NULL, 
	named BOOLEAN NOT NULL, 
	head TEXT, 
	created_at DOUBLE NOT NULL, 
	last_at DOUBLE NOT NULL, 
	UNIQUE (owner, agent_id), 
	UNIQUE (dir)
);
INSERT INTO "agents" VALUES(1,'local','ada','ada',1,'turn_00000000000000000000000000000006',1.0,20.0);
CREATE TABLE conversations (
	agent_key INTEGER NOT NULL, 
	metadata TEXT NOT NULL, 
	removed TEXT NOT NULL, 
	PRIMARY KEY (agent_key), 
	FOREIGN KEY(agent_key) REFERENCES agents ("key")
);
CREATE TABLE frames (
	agent_key INTEGER NOT NULL, 
	uuid TEXT NOT NULL, 
	PRIMARY KEY (agent_key, uuid), 
	FOREIGN KEY(agent_key) REFERENCES agents ("key")
);
INSERT INTO "frames" VALUES(1,'f1');
INSERT INTO "frames" VALUES(1,'f2');
INSERT INTO "frames" VALUES(1,'f3');
INSERT INTO "frames" VALUES(1,'f4');
CREATE TABLE idempotency_keys (
	owner TEXT NOT NULL, 
	"key" TEXT NOT NULL, 
	turn_id TEXT NOT NULL, 
	until DOUBLE, 
	PRIMARY KEY (owner, "key"), 
	FOREIGN KEY(turn_id) REFERENCES turns (id)
);
CREATE TABLE image_refs (
	agent_key INTEGER NOT NULL, 
	sha256 TEXT NOT NULL, 
	PRIMARY KEY (agent_key, sha256), 
	FOREIGN KEY(agent_key) REFERENCES agents ("key"), 
	FOREIGN KEY(sha256) REFERENCES images (sha256)
);
CREATE TABLE images (
	sha256 TEXT NOT NULL, 
	size BIGINT NOT NULL, 
	data TEXT NOT NULL, 
	PRIMARY KEY (sha256)
);
CREATE TABLE items (
	n INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id TEXT NOT NULL, 
	agent_key INTEGER NOT NULL, 
	turn_id TEXT, 
	data TEXT NOT NULL, 
	UNIQUE (id), 
	FOREIGN KEY(agent_key) REFERENCES agents ("key"), 
	FOREIGN KEY(turn_id) REFERENCES turns (id)
);
CREATE TABLE links (
	n INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	agent_key INTEGER NOT NULL, 
	from_session TEXT, 
	to_session TEXT NOT NULL, 
	turn_id TEXT, 
	reason TEXT NOT NULL, 
	detail TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	FOREIGN KEY(agent_key) REFERENCES agents ("key"), 
	FOREIGN KEY(turn_id) REFERENCES turns (id)
);
INSERT INTO "links" VALUES(1,1,NULL,'5e551011-0000-4000-8000-000000000001','turn_00000000000000000000000000000001','started','{}',12.0);
INSERT INTO "links" VALUES(2,1,'5e551011-0000-4000-8000-000000000001','5e551011-0000-4000-8000-000000000001','turn_00000000000000000000000000000003','rebuilt','{"found":"missing","why":"no transcript at /c/s1.jsonl","done":"written again from the chain''s records","records":4}',12.0);
INSERT INTO "links" VALUES(3,1,'5e551011-0000-4000-8000-000000000001','5e551011-0000-4000-8000-000000000001','turn_00000000000000000000000000000004','branched','{"why":"the path leaves the session''s","from_turn":"turn_00000000000000000000000000000003","records":6,"settled":"after a crash"}',12.0);
INSERT INTO "links" VALUES(4,1,'5e551011-0000-4000-8000-000000000001','5e551011-0000-4000-8000-000000000001','turn_00000000000000000000000000000006','adopted','{"why":"2 unknown records follow","turns":["turn_00000000000000000000000000000006"]}',19.0);
INSERT INTO "links" VALUES(5,1,NULL,'5e551011-0000-4000-8000-000000000001','turn_00000000000000000000000000000005','rebuilt','{"why":"the client''s history was imported","records":2}',19.0);
INSERT INTO "links" VALUES(6,1,'5e551011-0000-4000-8000-000000000001','5e551011-0000-4000-8000-000000000001','turn_00000000000000000000000000000004','rebuilt','{"why":"nobody waits for these results any more","records":9,"kept":"/v/salvage/1"}',19.0);
INSERT INTO "links" VALUES(7,1,'5e551011-0000-4000-8000-000000000001','5e551011-0000-4000-8000-000000000001','turn_00000000000000000000000000000004','moved','{"looked_for":"/a","found_at":"/b","done":"moved back"}',19.0);
CREATE TABLE meta (
	name TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "meta" VALUES('schema_version','2');
CREATE TABLE records (
	turn_id TEXT NOT NULL, 
	n INTEGER NOT NULL, 
	uuid TEXT, 
	synthetic BOOLEAN NOT NULL, 
	images TEXT, 
	line BLOB NOT NULL, 
	PRIMARY KEY (turn_id, n), 
	FOREIGN KEY(turn_id) REFERENCES turns (id)
);
INSERT INTO "records" VALUES('turn_00000000000000000000000000000001',0,'u1',0,NULL,X'7B2275756964223A227531227D');
INSERT INTO "records" VALUES('turn_00000000000000000000000000000002',0,'u2',0,NULL,X'7B2275756964223A227532227D');
INSERT INTO "records" VALUES('turn_00000000000000000000000000000003',0,'u3',0,NULL,X'7B2275756964223A227533227D');
INSERT INTO "records" VALUES('turn_00000000000000000000000000000004',0,'u4',0,NULL,X'7B2275756964223A227534227D');
CREATE TABLE sessions (
	n INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id TEXT NOT NULL, 
	agent_key INTEGER NOT NULL, 
	tip_turn_id TEXT, 
	transcript TEXT NOT NULL, 
	cli_version TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	mark TEXT, 
	UNIQUE (id), 
	FOREIGN KEY(agent_key) REFERENCES agents ("key"), 
	FOREIGN KEY(tip_turn_id) REFERENCES turns (id)
);
INSERT INTO "sessions" VALUES(1,'5e551011-0000-4000-8000-000000000001',1,'turn_00000000000000000000000000000006','/c/s1.jsonl','2.1.329',11.0,NULL);
CREATE TABLE turns (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id TEXT NOT NULL, 
	agent_key INTEGER NOT NULL, 
	parent_id TEXT, 
	status TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	depth INTEGER NOT NULL, 
	created_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	finished_at DOUBLE, 
	cost_usd DOUBLE, 
	delivery TEXT NOT NULL, 
	model TEXT NOT NULL, 
	effort TEXT, 
	profile TEXT, 
	stop_reason TEXT, 
	session_id TEXT, 
	continuity TEXT, 
	origin TEXT NOT NULL, 
	fingerprint TEXT NOT NULL, 
	frame_uuid TEXT, 
	path_hash TEXT, 
	instance TEXT, 
	usage TEXT NOT NULL, 
	timings TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	error TEXT, 
	attempts TEXT NOT NULL, 
	images TEXT, 
	system TEXT, 
	call TEXT, 
	input TEXT NOT NULL, 
	output TEXT NOT NULL, 
	tools TEXT NOT NULL, 
	UNIQUE (id), 
	FOREIGN KEY(agent_key) REFERENCES agents ("key"), 
	FOREIGN KEY(parent_id) REFERENCES turns (id)
);
INSERT INTO "turns" VALUES(1,'turn_00000000000000000000000000000001',1,NULL,'completed',431,1,11.0,12.0,14.0,0.25,'delivered','sonnet',NULL,NULL,'end_turn','5e551011-0000-4000-8000-000000000001','warm','chat','','f1','hash1','old','{"input_tokens":1,"output_tokens":2,"cache_read_tokens":3,"cache_write_tokens":4,"thinking_tokens":5}','{"committed":1.5}','{"rule":"head","messages":1,"matched":0,"imported":0,"delta":true,"records":"read from the transcript"}',NULL,'[{"n":1,"session_id":"5e551011-0000-4000-8000-000000000001","frame_uuid":"f1","status":"completed"}]',NULL,NULL,NULL,'[{"role":"user","content":[{"type":"text","text":"ask 1"}]}]','[{"type":"text","text":"answer 1"}]','[]');
INSERT INTO "turns" VALUES(2,'turn_00000000000000000000000000000002',1,'turn_00000000000000000000000000000001','requires_action',789,2,12.0,12.0,15.0,0.25,'delivered','sonnet',NULL,NULL,'end_turn','5e551011-0000-4000-8000-000000000001','warm','chat','','f2','hash2','old','{"input_tokens":1,"output_tokens":2,"cache_read_tokens":3,"cache_write_tokens":4,"thinking_tokens":5}','{"committed":1.5}','{"rule":"id","messages":1,"matched":0,"imported":0,"delta":true,"wants":{"tools":[{"name":"weather","description":"","schema":{"type":"object","properties":{}},"strict":false}],"tool_choice":{"mode":"required","allowed":["weather"],"parallel":true},"stop":["END"]},"verified":"unchanged since the last turn","records":"read from the transcript","stop_sequence":"END","retries":[{"error_status":529}],"cuts":[{"text":3,"thinking":0}]}',NULL,'[{"n":1,"session_id":"5e551011-0000-4000-8000-000000000001","frame_uuid":"f2","status":"completed"}]',NULL,NULL,NULL,'[{"role":"user","content":[{"type":"text","text":"ask 2"}]}]','[{"type":"tool_use","id":"call_1","name":"weather","input":{}}]','[]');
INSERT INTO "turns" VALUES(3,'turn_00000000000000000000000000000003',1,'turn_00000000000000000000000000000002','completed',1073,3,13.0,12.0,16.0,0.25,'delivered','sonnet',NULL,NULL,'end_turn','5e551011-0000-4000-8000-000000000001','warm','chat','','f3','hash3','old','{"input_tokens":1,"output_tokens":2,"cache_read_tokens":3,"cache_write_tokens":4,"thinking_tokens":5}','{"committed":1.5}','{"rule":"history","messages":5,"matched":4,"imported":0,"delta":false,"diverged_at":4,"format":{"schema":null},"repaired":{"found":"missing","why":"no transcript at /c/s1.jsonl","done":"written again from the chain''s records","records":4},"process":"had ended with exit code -9","reloaded":["touched"],"left_off":"turn_00000000000000000000000000000009","sandbox":"/x","output_refused":"''a'' is missing","compacted":{"trigger":"auto"},"records":"the transcript is gone; records made from the frames"}',NULL,'[{"n":1,"session_id":"5e551011-0000-4000-8000-000000000001","frame_uuid":"f3","status":"failed","why":"''a'' is missing","repaired":{"found":"missing","why":"no transcript at /c/s1.jsonl","done":"written again from the chain''s records","records":4}},{"n":2,"session_id":"5e551011-0000-4000-8000-000000000001","frame_uuid":"f3","status":"completed"}]',NULL,NULL,NULL,'[{"role":"user","content":[{"type":"text","text":"ask 3"}]}]','[{"type":"text","text":"answer 3"}]','[]');
INSERT INTO "turns" VALUES(4,'turn_00000000000000000000000000000004',1,'turn_00000000000000000000000000000003','completed',618,4,14.0,12.0,17.0,0.25,'delivered','sonnet',NULL,NULL,'end_turn','5e551011-0000-4000-8000-000000000001','warm','chat','','f4','hash4','old','{"input_tokens":1,"output_tokens":2,"cache_read_tokens":3,"cache_write_tokens":4,"thinking_tokens":5}','{"committed":1.5}','{"rule":"id","messages":1,"matched":0,"imported":0,"delta":true,"session":{"why":"the path leaves the session''s","from_turn":"turn_00000000000000000000000000000003","records":6},"settled":"the proxy died after the CLI had finished this turn: read from the transcript","a later version''s":1}',NULL,'[{"n":1,"session_id":"5e551011-0000-4000-8000-000000000001","frame_uuid":"f4","status":"completed"}]',NULL,NULL,NULL,'[{"role":"user","content":[{"type":"text","text":"ask 4"}]}]','[{"type":"text","text":"answer 4"}]','[]');
INSERT INTO "turns" VALUES(5,'turn_00000000000000000000000000000005',1,NULL,'completed',256,1,9.0,NULL,9.0,NULL,'delivered','sonnet',NULL,NULL,NULL,NULL,NULL,'imported','',NULL,'hash5',NULL,'{"input_tokens":0,"output_tokens":0,"cache_read_tokens":0,"cache_write_tokens":0,"thinking_tokens":0}','{}','{"rule":"unknown","why":"sent by the client as history"}',NULL,'[]',NULL,NULL,NULL,'[{"role":"user","content":[{"type":"text","text":"brought"}]}]','[{"type":"text","text":"with"}]','[]');
INSERT INTO "turns" VALUES(6,'turn_00000000000000000000000000000006',1,'turn_00000000000000000000000000000004','completed',313,5,19.0,NULL,19.0,NULL,'delivered','sonnet',NULL,NULL,NULL,'5e551011-0000-4000-8000-000000000001',NULL,'adopted','',NULL,'hash6',NULL,'{"input_tokens":0,"output_tokens":0,"cache_read_tokens":0,"cache_write_tokens":0,"thinking_tokens":0}','{}','{"rule":"adopted","why":"2 unknown records follow","session":"5e551011-0000-4000-8000-000000000001","compacted":{}}',NULL,'[]',NULL,NULL,NULL,'[{"role":"user","content":[{"type":"text","text":"theirs"}]}]','[{"type":"text","text":"too"}]','[]');
INSERT INTO "turns" VALUES(7,'turn_00000000000000000000000000000007',1,NULL,'queued',234,0,20.0,NULL,NULL,NULL,'pending','sonnet',NULL,NULL,NULL,NULL,NULL,'chat','',NULL,NULL,'old','{"input_tokens":0,"output_tokens":0,"cache_read_tokens":0,"cache_write_tokens":0,"thinking_tokens":0}','{}','{"rule":"head","messages":1,"matched":0,"imported":0,"delta":true}',NULL,'[]',NULL,NULL,NULL,'[{"role":"user","content":[{"type":"text","text":"late"}]}]','[]','[]');
CREATE INDEX agents_last_at ON agents (last_at, "key");
CREATE INDEX turns_agent ON turns (agent_key, seq);
CREATE INDEX turns_parent ON turns (parent_id);
CREATE INDEX turns_status ON turns (status, seq);
CREATE INDEX turns_delivery ON turns (delivery, seq);
CREATE INDEX turns_fingerprint ON turns (fingerprint, seq);
CREATE INDEX turns_path_hash ON turns (path_hash);
CREATE INDEX image_refs_sha256 ON image_refs (sha256);
CREATE INDEX sessions_agent ON sessions (agent_key, tip_turn_id);
CREATE INDEX sessions_tip ON sessions (tip_turn_id);
CREATE INDEX links_turn ON links (turn_id);
CREATE INDEX links_agent ON links (agent_key, n);
CREATE INDEX idempotency_keys_until ON idempotency_keys (until);
CREATE INDEX idempotency_keys_turn ON idempotency_keys (turn_id);
CREATE INDEX items_turn ON items (turn_id);
CREATE INDEX items_agent ON items (agent_key, n);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('agents',1);
INSERT INTO "sqlite_sequence" VALUES('turns',7);
INSERT INTO "sqlite_sequence" VALUES('sessions',1);
INSERT INTO "sqlite_sequence" VALUES('links',7);
COMMIT;
